"""The undisturbed run: the same API over one engine in this process, without Ray, replicas or network.

Run as ``python -m tests.chaos.reference MODEL IN.json OUT.json``: a process of its own gives its memory back.
"""

import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from warmroot.actors.engine_host import EngineHost
from warmroot.actors.local_engine import LocalGenerator
from warmroot.cluster.config import WarmrootConfig
from warmroot.router.frontend import Frontend
from warmroot.router.openai.app import build_app
from warmroot.router.openai.cluster_state import ReplicaStatus, RoutingChoice, RoutingStats, StoreStatus
from warmroot.router.openai.settings import ApiSettings

from .answers import Answer, add, from_json, to_json

CONCURRENCY = 16
PRECISION = {"dtype": "float32", "quantization": "none"}
"""Replicas that are cut differently round differently: in float32 that does not reach the tokens."""
Question = tuple[str, dict[str, Any]]
"""Path and body, the latter without ``stream`` and ``model``."""


class NoCluster:
    """There is none to tell of."""

    def replicas(self) -> Sequence[ReplicaStatus]:
        return ()

    def routing(self) -> RoutingStats:
        return RoutingStats()

    def explain(self, request_id: str = "", limit: int = 1) -> Sequence[RoutingChoice]:
        return ()

    def store(self) -> StoreStatus:
        return StoreStatus()


def undisturbed(questions: Sequence[Question], model: str) -> list[Answer]:
    """The right answer to each."""
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder) / "questions.json", Path(folder) / "answers.json"
        asked.write_text(json.dumps(questions))
        subprocess.run([sys.executable, "-m", __name__, model, str(asked), str(answered)], check=True)
        return [from_json(answer) for answer in json.loads(answered.read_text())]


async def _answers(questions: Sequence[Question], model: str) -> list[Answer]:
    config = WarmrootConfig.of(model, max_num_seqs=CONCURRENCY, threads_per_replica=1, num_kv_blocks=1500, **PRECISION)
    host = EngineHost.load(config, lambda stage, done, total: None)
    generator = LocalGenerator(host.start, asyncio.get_running_loop())
    frontend = Frontend(generator, host.tokenizer, model=model, max_model_len=host.max_model_len)
    app = build_app({model: frontend}, ApiSettings(), NoCluster())
    turns = asyncio.Semaphore(CONCURRENCY)
    try:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://reference") as client:

            async def one(path: str, body: dict[str, Any]) -> Answer:
                async with turns:
                    response = await client.post(path, json=body, timeout=600.0)
                    assert response.status_code == 200, response.text
                    answer: Answer = {}
                    add(answer, response.json())
                    return answer

            return await asyncio.gather(*(one(*question) for question in questions))
    finally:
        generator.close()


def main(model: str, asked: str, answered: str) -> None:
    """Answer what a file asks."""
    answers = asyncio.run(_answers(json.loads(Path(asked).read_text()), model))
    Path(answered).write_text(json.dumps(list(map(to_json, answers))))


if __name__ == "__main__":
    main(*sys.argv[1:])
