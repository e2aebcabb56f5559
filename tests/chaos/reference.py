"""The undisturbed run: the same API over one engine in this process, without Ray, replicas or network.

Run as ``python -m tests.chaos.reference SEED COUNT MODEL OUT.json``: a process of its own gives its memory back.
"""

import asyncio
import json
import sys
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
from .asks import CHAT, Ask, AskPool

CONCURRENCY = 16
PRECISION = {"dtype": "float32", "quantization": "none"}
"""Replicas that are cut differently round differently: in float32 that does not reach the tokens."""
Gaps = dict[int, list[float]]


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


async def right_answers(asks: Sequence[Ask], model: str) -> dict[int, tuple[Answer, Gaps]]:
    """Each ask's answer, and how much likelier each token of its greedy ones was than the next."""
    config = WarmrootConfig.of(model, max_num_seqs=CONCURRENCY, threads_per_replica=1, num_kv_blocks=1500, **PRECISION)
    host = EngineHost.load(config, lambda stage, done, total: None)
    generator = LocalGenerator(host.start, asyncio.get_running_loop())
    frontend = Frontend(
        generator,
        host.tokenizer,
        model=model,
        max_model_len=host.max_model_len,
        vocab_size=host.model.spec.vocab_size,
    )
    app = build_app({model: frontend}, ApiSettings(), NoCluster())
    turns = asyncio.Semaphore(CONCURRENCY)
    try:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://reference") as client:

            async def one(ask: Ask) -> tuple[Answer, Gaps]:
                async with turns:
                    return await _right_answer(client, ask)

            answers = await asyncio.gather(*map(one, asks))
    finally:
        generator.close()
    return {ask.number: answer for ask, answer in zip(asks, answers, strict=True)}


async def _right_answer(client: httpx.AsyncClient, ask: Ask) -> tuple[Answer, Gaps]:
    answer: Answer = {}
    add(answer, await _post(client, ask.path, ask.body))
    if ask.body["temperature"] or any("penalty" in field for field in ask.body):
        return answer, {}
    closest: Answer = {}
    more = {"logprobs": True, "top_logprobs": 2} if ask.path == CHAT else {"logprobs": 2}
    add(closest, await _post(client, ask.path, ask.body | more | {"return_tokens_as_token_ids": True}))
    return answer, {index: [_gap(top) for _, _, top in choice.logprobs] for index, choice in closest.items()}


def _gap(top: dict[str, float]) -> float:
    best, second = sorted(top.values(), reverse=True)[:2]
    return best - second


async def _post(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = await client.post(path, json=body, timeout=600.0)
    assert response.status_code == 200, response.text
    return response.json()


def read_reference(path: Path) -> dict[int, tuple[Answer, Gaps]]:
    """What the process wrote, by the asks' numbers."""
    entries = json.loads(path.read_text())
    gaps = [{int(index): values for index, values in entry["gaps"].items()} for entry in entries]
    return {e["number"]: (from_json(e["answer"]), gap) for e, gap in zip(entries, gaps, strict=True)}


def main(seed: str, count: str, model: str, out: str) -> None:
    """Answer the pool of a seed."""
    answers = asyncio.run(right_answers(AskPool(int(seed)).take(int(count)), model))
    entries = [{"number": n, "answer": to_json(answer), "gaps": gaps} for n, (answer, gaps) in answers.items()]
    Path(out).write_text(json.dumps(entries))


if __name__ == "__main__":
    main(*sys.argv[1:])
