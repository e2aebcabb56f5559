"""The examples, run as a user runs them: programs of their own beside a running cluster."""

import asyncio
import re
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from .cluster_harness import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.model]

EXAMPLES = Path(__file__).parents[2] / "examples"
CACHED = re.compile(r"\[(\d+) of (\d+) prompt tokens cached")


async def run(cluster: Cluster, name: str, *arguments: str) -> str:
    """What the example prints; fails with what it complains of."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(EXAMPLES / name),
        *arguments,
        env=cluster.environment(),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), 240)
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, err.decode()
    return out.decode()


def cached(text: str) -> list[tuple[int, int]]:
    """(cached, prompt tokens) of each answer."""
    return [(int(found), int(total)) for found, total in CACHED.findall(text)]


async def test_chat(cluster: Cluster):
    turns = cached(await run(cluster, "chat.py"))
    assert len(turns) == 3
    for (_, before), (found, total) in pairwise(turns):
        assert before - 16 < found < total


async def test_ray_actor(cluster: Cluster):
    lines = (await run(cluster, "ray_actor.py")).splitlines()
    assert len(lines) == 7
    assert len(lines[-1].split()) == 9


async def test_json_and_tools(cluster: Cluster):
    person, call, *answer = (await run(cluster, "json_and_tools.py")).splitlines()
    assert person.startswith("{'name': ")
    assert re.fullmatch(r"get_weather\(.*\) -> In .* the sun shines, at 21 degrees\.", call)
    assert answer


async def test_openai_client(cluster: Cluster):
    text = await run(cluster, "openai_client.py")
    assert len(cached(text)) == 1
    assert len(text.split()) > 6


async def test_openai_client_takes_the_endpoint_as_argument(cluster: Cluster):
    assert cached(await run(cluster, "openai_client.py", cluster.url))


async def test_shared_prefix(cluster: Cluster):
    first, *others = cached(await run(cluster, "shared_prefix.py"))
    assert first[0] == 0
    assert len(others) == 3
    assert all(found > 80 for found, _ in others)


async def test_parallel(cluster: Cluster):
    assert "The capital of France is" in await run(cluster, "parallel.py")


def test_every_example_is_run():
    source = Path(__file__).read_text()
    assert all(f'"{example.name}"' in source for example in EXAMPLES.glob("*.py"))
