"""How soon a router that starts late is of use: ``python tests/bench/bench_join.py [--blocks N] [--replicas N]``.

Fills a redis-server of its own with the snapshots of a fleet, warmest prefixes first as replicas send them, starts a
router's follower in a process that knows nothing, and prints as JSON after how many seconds its predictions reach 90 %
of the final hit rate and after how many all blocks are known. Prompts continue sessions; the chance of each falls with
its rank, as in chat traffic.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from array import array
from itertools import accumulate
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from redis_server import RedisServer

from warmroot.cluster.ids import BlockHash, Epoch, ReplicaId
from warmroot.cluster.messages import ReplicaInfo
from warmroot.cluster.metadata_store import parse_store
from warmroot.kv_store.events import BlocksStored, KvEvent, KvEventBatch, SnapshotPart, encode
from warmroot.kv_store.hashing import namespace_root
from warmroot.kv_store.index import PrefixIndex
from warmroot.kv_store.redis_bus import RedisEventBus
from warmroot.kv_store.snapshot_parts import snapshot_parts
from warmroot.router.bus_follower import BusFollower

ROOT = namespace_root("m")
BLOCK = 16
SESSION_BLOCKS = 156
"""About 2,500 tokens: half of a prompt of 5,000."""
SAMPLE = 400
ZIPF = 1.0


class Fleet:
    """Sessions on replicas, and prompts that continue them."""

    def __init__(self, num_blocks: int, num_replicas: int, seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.num_replicas = num_replicas
        per_replica = max(1, num_blocks // num_replicas // SESSION_BLOCKS)
        # Rank by rank over the replicas, so that the warmest sessions are spread over all.
        self.sessions = [[self._session(replica) for replica in range(num_replicas)] for _ in range(per_replica)]
        weights = [1.0 / (rank + 1) ** ZIPF for rank in range(per_replica * num_replicas)]
        self._flat = [session for row in self.sessions for session in row]
        chosen = self.rng.choices(self._flat, cum_weights=list(accumulate(weights)), k=SAMPLE)
        self.prompts = [session.token_ids for session in chosen]

    @property
    def num_blocks(self) -> int:
        return len(self._flat) * SESSION_BLOCKS

    def snapshot(self, replica: int) -> list[bytes]:
        """Encoded parts, as a replica sends them."""
        stored: list[KvEvent] = [row[replica] for row in self.sessions]
        name = ReplicaId(f"replica-{replica}")
        return [
            encode(KvEventBatch(name, Epoch(1), number, (SnapshotPart(number), *part)), compress=True)
            for number, part in enumerate(snapshot_parts(stored))
        ]

    def hit_rate(self, index: PrefixIndex) -> float:
        """Share of the sampled sessions' tokens that the index knows."""
        found = sum(max(index.match(ROOT, tokens, BLOCK).values(), default=0) for tokens in self.prompts)
        return found / (SAMPLE * SESSION_BLOCKS * BLOCK)

    def _session(self, replica: int) -> BlocksStored:
        tokens = array("i", (self.rng.randrange(50_000) for _ in range(SESSION_BLOCKS * BLOCK))).tobytes()
        hashes = tuple(BlockHash(self.rng.randbytes(16)) for _ in range(SESSION_BLOCKS))
        return BlocksStored(ROOT, hashes, tokens)


def replica_info(name: str) -> ReplicaInfo:
    return ReplicaInfo(
        replica=ReplicaId(name),
        epoch=Epoch(1),
        model="m",
        address="127.0.0.1:1",
        kv_namespace=ROOT,
        block_size=BLOCK,
        kv_total_blocks=100_000,
        max_num_seqs=64,
        max_num_batched_tokens=512,
        max_model_len=4096,
        prefill_tokens_per_s=1000.0,
        decode_step_s=0.01,
    )


async def join(server: RedisServer, fleet: Fleet) -> dict[str, float]:
    """Fill the server, then follow it from nothing. Times are seconds of the follower alone."""
    address = parse_store(server.url)
    assert address is not None
    writer, bus, index = RedisEventBus(address), RedisEventBus(address), PrefixIndex()
    for replica in range(fleet.num_replicas):
        await writer.heartbeat(replica_info(f"replica-{replica}"), 600.0)
        await writer.publish_snapshot(f"replica-{replica}", 1, *fleet.snapshot(replica))
    memory = int(server.cli("info", "memory").partition("used_memory:")[2].split()[0])
    follower = BusFollower(bus, index, lambda infos: None)
    curve: list[tuple[float, float]] = []
    spent, total = 0.0, fleet.num_blocks
    while index.num_blocks < total:
        began = time.perf_counter()
        step = asyncio.ensure_future(follower.follow_once(0.5))
        while not step.done():
            # The follower yields after every part: that is when a request would be routed.
            await asyncio.sleep(0)
            paused = time.perf_counter()
            if not curve or spent + paused - began - curve[-1][0] > 0.1:
                curve.append((spent + paused - began, fleet.hit_rate(index)))
                began += time.perf_counter() - paused
        spent += time.perf_counter() - began
        step.result()
    final = fleet.hit_rate(index)
    curve.append((spent, final))
    await writer.close()
    await bus.close()
    return {
        "blocks": total,
        "replicas": fleet.num_replicas,
        "final_hit_rate": round(final, 4),
        "useful_s": round(next(at for at, rate in curve if rate >= 0.9 * final), 2),
        "complete_s": round(spent, 2),
        "blocks_per_s": round(total / spent),
        "redis_bytes_per_block": round(memory / total, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--replicas", type=int, default=64)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = RedisServer(Path(folder)).start()
        try:
            print(json.dumps(asyncio.run(join(server, Fleet(arguments.blocks, arguments.replicas)))))
        finally:
            server.kill()


if __name__ == "__main__":
    main()
