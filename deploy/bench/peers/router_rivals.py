"""The rivals of ``bench router`` that are installed, each in a process of its own, each as its own API allows.

``python -m warmroot.deploy.bench.peers.router_rivals NAME BLOCKS REPLICAS PROMPTS SEED`` prints one JSON object. Times
are of the CPU of all the process's threads: some of them look up in a thread of their own.
"""

import asyncio
import gc
import importlib.util
import json
import sys
import time
from array import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from ..router_load import BLOCK_SIZE, FleetLoad
from ..router_measure import Timed, resident_bytes

Figures = dict[str, Any]

_LETTERS = np.frombuffer(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789 .", dtype=np.uint8)
_LETTERS_PER_TOKEN = 4
_RAY_TREE = "llm/_internal/serve/routing_policies/prefix_aware/prefix_tree.py"
_WORKERS_IN_FLIGHT = 4
_NOWHERE = "tcp://127.0.0.1:9"


def ray_prefix_tree(load: FleetLoad, prompts: Sequence[bytes]) -> Figures:
    """``PrefixTree`` of Ray Serve's PrefixCacheAffinityRouter: a tree of characters, 4 for each token here."""
    spec = importlib.util.find_spec("ray")
    if spec is None or spec.origin is None or not (path := Path(spec.origin).parent / _RAY_TREE).exists():
        raise ImportError("this ray has no prefix tree")
    tree = _load(path).PrefixTree()
    tree.add_tenants(list(load.names), 0.0)
    gc.collect()
    memory, begin = resident_bytes(), time.process_time()
    for number, conversation in enumerate(load.conversations):
        tree.insert(_text(conversation.tokens), load.names[conversation.replica], float(number))
    spent = time.process_time() - begin
    texts = [_text(tokens) for tokens in prompts]
    names = list(load.names)
    return {
        "lookup": _timed(lambda text: tree.prefix_match(text, names), texts),
        "stored_blocks_per_s": _num_blocks(load) / spent,
        "bytes_per_token": (resident_bytes() - memory) / _num_blocks(load) / BLOCK_SIZE,
    }


def dynamo_radix_tree(load: FleetLoad, prompts: Sequence[bytes]) -> Figures:
    """Dynamo's ``RadixTree`` and its hash of the prompt's blocks, in Rust through its Python bindings."""
    from dynamo import _core  # pyright: ignore[reportMissingImports]

    tree, events = _core.RadixTree(), list[tuple[int, bytes]]()
    for number, conversation in enumerate(load.conversations):
        hashes = _core.compute_block_hash_for_seq(_ids(conversation.tokens), BLOCK_SIZE)
        blocks = [{"block_hash": key, "tokens_hash": key} for key in hashes]
        stored = {"event_id": number, "data": {"stored": {"parent_hash": None, "blocks": blocks}}, "dp_rank": 0}
        events.append((conversation.replica, json.dumps(stored).encode()))
    gc.collect()
    memory, begin = resident_bytes(), time.process_time()
    for worker, data in events:
        tree.apply_event(worker, data)
    tree.find_matches([0])  # events wait in a queue
    spent = time.process_time() - begin

    def look_up(ids: list[int]) -> Any:
        return tree.find_matches(_core.compute_block_hash_for_seq(ids, BLOCK_SIZE)).scores

    return {
        "lookup": _timed(look_up, [_ids(tokens) for tokens in prompts]),
        "stored_blocks_per_s": _num_blocks(load) / spent,
        "bytes_per_token": (resident_bytes() - memory) / _num_blocks(load) / BLOCK_SIZE,
    }


def dynamo_selection(load: FleetLoad, prompts: Sequence[bytes]) -> Figures:
    """Dynamo's ``SelectionService``: select and reserve. It hears no KV events here, so its index is empty."""
    return asyncio.run(_dynamo_selection(load, prompts))


async def _dynamo_selection(load: FleetLoad, prompts: Sequence[bytes]) -> Figures:
    from dynamo import _core  # pyright: ignore[reportMissingImports]

    service = _core.SelectionService()
    common = {"model_name": "bench", "tenant_id": "default"}
    workers = list(range(len(load.names)))
    for worker in workers:
        await service.upsert_worker(
            {
                **common,
                "worker_id": worker,
                "endpoint": f"bench://{worker}",
                "block_size": BLOCK_SIZE,
                "max_num_batched_tokens": 8192,
                "data_parallel_start_rank": 0,
                "data_parallel_size": 1,
                "kv_events_endpoints": {0: _NOWHERE},
            }
        )
    flying: list[str] = []

    async def decide(request: dict[str, Any]) -> None:
        await service.select_and_reserve(request)

    async def land() -> None:
        if len(flying) > _WORKERS_IN_FLIGHT * len(workers):
            done = flying.pop(0)
            await service.prefill_complete(done)
            await service.free_reservation(done)

    requests = [
        {**common, "selection_id": str(number), "token_ids": _ids(tokens), "allowed_worker_ids": workers}
        for number, tokens in enumerate(prompts)
    ]
    taken: list[int] = []
    for request in requests:
        taken.append(await _timed_await(decide, request))
        flying.append(request["selection_id"])
        await land()
    service.shutdown()
    return {"decision": asdict(Timed.from_ns(taken))}


RIVALS: dict[str, Callable[[FleetLoad, Sequence[bytes]], Figures]] = {
    "ray PrefixTree": ray_prefix_tree,
    "dynamo RadixTree": dynamo_radix_tree,
    "dynamo SelectionService": dynamo_selection,
}


def main(argv: Sequence[str]) -> None:
    """See the module."""
    name, blocks, replicas, prompts, seed = argv
    load = FleetLoad(int(blocks), int(replicas), int(seed))
    try:
        figures = RIVALS[name](load, load.prompts(int(prompts)))
    except ImportError as error:
        figures = {"absent": str(error)}
    print(json.dumps(figures), flush=True)


def _timed(call: Callable[[Any], object], arguments: Sequence[Any]) -> Figures:
    taken: list[int] = []
    for argument in arguments:
        begin = time.process_time_ns()
        call(argument)
        taken.append(time.process_time_ns() - begin)
    return asdict(Timed.from_ns(taken))


async def _timed_await(call: Callable[[Any], Awaitable[object]], argument: Any) -> int:
    begin = time.process_time_ns()
    await call(argument)
    return time.process_time_ns() - begin


def _load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("ray_prefix_tree", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _num_blocks(load: FleetLoad) -> int:
    """Stored by all replicas."""
    return sum(len(conversation.tokens) for conversation in load.conversations) // (4 * BLOCK_SIZE)


def _ids(tokens: bytes) -> list[int]:
    return array("i", tokens).tolist()


def _text(tokens: bytes) -> str:
    ids = np.frombuffer(tokens, dtype="<i4")
    digits = ids[:, None] >> np.arange(0, 6 * _LETTERS_PER_TOKEN, 6) & 63
    return _LETTERS[digits].tobytes().decode()


if __name__ == "__main__":
    main(sys.argv[1:])
