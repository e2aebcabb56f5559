"""One rank of a gang as a process of its own, run by the tests: ``parallel_rank.py CASE RANK SIZE STORE_PORT``."""

import hashlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.distributed import PrefixStore

from warmroot.actors.kernels import library as library_module
from warmroot.actors.kernels.library import NativeLibrary, native
from warmroot.actors.parallel.collectives import Collectives
from warmroot.actors.parallel.groups import Groups, RankLists, make_groups
from warmroot.actors.parallel.hop import recv_tensor, send_tensor
from warmroot.actors.parallel.rendezvous import join_store
from warmroot.actors.parallel.shared_memory import SharedMemoryGroup
from warmroot.actors.parallel.torch_group import TorchGroup
from warmroot.cluster.errors import EngineError, RankLostError

CPU = torch.device("cpu")
LONG_S = 120.0
"""Longer than a test may run: what ends before it was noticed and not waited for."""


class Rank:
    def __init__(self, rank: int, size: int, port: int) -> None:
        self.rank = rank
        self.size = size
        self.store = join_store("127.0.0.1", port, 60.0)

    def groups(self, name: str, *, library: NativeLibrary | None, deadline_s: float = LONG_S) -> Groups:
        """All groups hold all ranks; ``tp`` is in shared memory where there is a native ``library``."""
        everyone = list(range(self.size))
        return make_groups(
            self.rank,
            RankLists(tp=everyone, pp=everyone, ep=everyone, control=everyone),
            PrefixStore(name, self.store),
            address="127.0.0.1",
            device=CPU,
            library=library,
            deadline_s=deadline_s,
        )

    def meet(self, name: str) -> None:
        """Return when all ranks have come, over the store."""
        self.store.set(f"{name}/{self.rank}", "")
        self.store.wait([f"{name}/{rank}" for rank in range(self.size)])

    def values(self, shape: tuple[int, ...], dtype: torch.dtype, rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 + rank)
        return torch.randn(shape, generator=generator).to(dtype)


def lost(call: Callable[[], object], *words: str) -> None:
    """``call`` must raise a RankLostError with these words."""
    try:
        call()
    except RankLostError as error:
        assert all(word in error.message for word in words), error.message
    else:
        raise AssertionError(f"nothing was lost: {words}")


def check_sums(rank: Rank, group: Collectives, *, in_order: bool) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for shape in ((0,), (1,), (7,), (8, 576), (3, 257), (600_001,))[: 6 if in_order else 5]:
            parts = [rank.values(shape, dtype, other) for other in range(rank.size)]
            x = parts[rank.rank].clone()
            group.all_reduce(x)
            expected = torch.stack([part.float() for part in parts]).double().sum(0)
            if in_order:
                expected = parts[0].float()
                for part in parts[1:]:
                    expected = expected + part.float()
                assert torch.equal(x, expected.to(dtype)), (dtype, shape)
            else:
                torch.testing.assert_close(x.double(), expected.double(), rtol=2e-2, atol=5e-2)
            bits = hashlib.blake2b(x.view(torch.uint8).numpy().tobytes() if x.numel() else b"", digest_size=8).digest()
            everyone = group.all_gather(torch.frombuffer(bytearray(bits), dtype=torch.uint8))
            assert (everyone == everyone[0]).all(), (dtype, shape)


def check_many_sums(rank: Rank, group: Collectives) -> None:
    """Ranks that come early or late must not meet numbers of another turn."""
    for turn in range(400):
        if (turn * 7 + rank.rank * 3) % 50 == 0:
            time.sleep(0.002)
        x = torch.full((1 + turn % 37,), float(turn + rank.rank))
        group.all_reduce(x)
        assert (x == rank.size * turn + sum(range(rank.size))).all(), (turn, x)


def check_gathers(rank: Rank, group: Collectives) -> None:
    for numel in (1, 1000, 700_003):
        x = torch.arange(numel, dtype=torch.int64) + rank.rank
        expected = torch.stack([torch.arange(numel) + other for other in range(rank.size)])
        assert torch.equal(group.all_gather(x), expected)
        for root in range(rank.size):
            gathered = group.gather(x, root)
            assert gathered is None if rank.rank != root else torch.equal(gathered, expected)
    columns = group.all_gather(torch.full((4, 6), float(rank.rank))[:, ::2])  # not contiguous
    assert torch.equal(columns[1], torch.ones(4, 3))


def check_broadcast_and_hops(rank: Rank, group: Collectives) -> None:
    for root in range(rank.size):
        x = torch.full((5,), float(rank.rank))
        group.broadcast(x, root)
        assert (x == root).all()
    after, before = (rank.rank + 1) % rank.size, (rank.rank - 1) % rank.size
    sent = [group.send(torch.full((3, 4), float(10 * n + rank.rank)), after) for n in range(3)]
    for n in range(3):
        x = torch.empty(3, 4)
        group.recv(x, before)
        assert (x == 10 * n + before).all()
    for pending in sent:
        pending.wait()
    for x in (torch.ones(2, 3, dtype=torch.bfloat16), torch.arange(5), torch.ones(0, 7)):
        if rank.rank == 0:
            send_tensor(group, x, 1).wait()
        elif rank.rank == 1:
            got = recv_tensor(group, 0, CPU)
            assert got.dtype == x.dtype and torch.equal(got, x)


def check_all_to_all(rank: Rank, group: Collectives) -> None:
    """Rank a sends (a + 2 b) % 4 rows of 100 a + b to rank b."""
    for width in (1, 24):
        counts = [(rank.rank + 2 * other) % 4 for other in range(rank.size)]
        theirs = group.exchange_counts(counts)
        assert theirs == [(other + 2 * rank.rank) % 4 for other in range(rank.size)]
        rows = torch.cat([torch.full((n, width), 100.0 * rank.rank + other) for other, n in enumerate(counts)])
        out = torch.empty(sum(theirs), width)
        group.all_to_all(rows, counts, out, theirs).wait()
        expected = [torch.full((n, width), 100.0 * other + rank.rank) for other, n in enumerate(theirs)]
        assert torch.equal(out, torch.cat(expected))
    nothing, none = torch.empty(0, 24), [0] * rank.size
    group.all_to_all(nothing, none, torch.empty(0, 24), none).wait()


def check_traffic(rank: Rank, groups: Groups) -> None:
    groups.traffic.clear()
    groups.tp.all_reduce(torch.zeros(8, 576))
    groups.ep.all_reduce(torch.zeros(2, 3, dtype=torch.bfloat16))
    counts = [2] * rank.size
    assert groups.ep.exchange_counts(counts) == counts
    rows = torch.zeros(2 * rank.size, 5)
    groups.ep.all_to_all(rows, counts, torch.empty_like(rows), counts).wait()
    if rank.rank == 0:
        groups.pp.send(torch.zeros(64, 576), 1).wait()
    elif rank.rank == 1:
        groups.pp.recv(torch.empty(64, 576), 0)
    expected = {
        "all_reduce": 8 * 576 * 4 + 2 * 3 * 2,
        "counts": 8 * (rank.size - 1),
        "all_to_all": 2 * 5 * 4 * (rank.size - 1),
        "hop": 64 * 576 * 4 if rank.rank == 0 else 0,
    }
    assert {kind: groups.traffic.num_bytes[kind] for kind in expected} == expected, groups.traffic.num_bytes


def collectives(rank: Rank) -> None:
    for library in libraries():
        groups = rank.groups(library.name, library=library)
        assert isinstance(groups.tp, SharedMemoryGroup)
        check_sums(rank, groups.tp, in_order=True)
        check_many_sums(rank, groups.tp)
        check_gathers(rank, groups.tp)
        groups.close()
    groups = rank.groups("all", library=native())
    assert (groups.tp.rank, groups.tp.size) == (rank.rank, rank.size)
    assert isinstance(groups.ep, TorchGroup)
    check_sums(rank, groups.ep, in_order=False)
    check_gathers(rank, groups.ep)
    for group in (groups.tp, groups.ep):
        check_broadcast_and_hops(rank, group)
        check_all_to_all(rank, group)
    check_traffic(rank, groups)
    groups.control.barrier()
    groups.tp.barrier()
    for group in (groups.tp, groups.ep):
        group.close()
        group.close()
        lost(lambda group=group: group.all_reduce(torch.zeros(1)), "this rank has left its group")
    fallback = rank.groups("fallback", library=native() if rank.rank == 0 else None)
    assert isinstance(fallback.tp, TorchGroup)  # one rank without the library: nobody uses it
    fallback.control.barrier()


def libraries() -> list[NativeLibrary]:
    best = native()
    if best is None:
        return []
    names = ("generic", "avx2", "avx512")
    found = {path.name.split(".")[0][1:]: str(path) for path in Path(library_module.__file__).parent.glob("_*.so")}
    return [NativeLibrary(name, found[name]) for name in names[: names.index(best.name) + 1] if name in found]


def faults(rank: Rank) -> None:
    """Rank 1 leaves, is late, and comes out of step; rank 0 must say so."""
    one = torch.zeros(1)
    groups = rank.groups("leaves", library=native())
    groups.tp.all_reduce(one)
    if rank.rank == 0:
        for _ in range(2):
            lost(lambda: groups.tp.all_reduce(one), "all_reduce: rank 1 is gone")
    groups.close()

    groups = rank.groups("late", library=native(), deadline_s=0.3)
    if rank.rank == 0:
        lost(lambda: groups.tp.all_reduce(one), "all_reduce: rank 1 did not come within 0.3 s")
        lost(lambda: groups.pp.recv(one, 1), "hop: lost rank 1")
    rank.meet("late is over")
    groups.close()

    groups = rank.groups("unequal", library=native())
    failed(lambda: groups.tp.all_reduce(torch.zeros(1 + rank.rank)), EngineError)
    rank.meet("unequal is over")
    groups.close()

    groups = rank.groups("types", library=native())
    failed(lambda: groups.tp.all_reduce(torch.zeros(3, dtype=torch.int64)), ValueError)
    failed(lambda: groups.tp.all_reduce(torch.zeros(4, 4).t()), ValueError)
    groups.tp.barrier()


def failed(call: Callable[[], object], kind: type[Exception]) -> None:
    try:
        call()
    except kind:
        return
    raise AssertionError(f"no {kind.__name__}")


def killed(rank: Rank) -> None:
    """Rank 1 is killed between two sums; one of the others waits for it in a sum, one in a hop."""
    groups = rank.groups("killed", library=native())
    x = torch.zeros(8, 576)
    for _ in range(3):
        groups.tp.all_reduce(x)
        groups.control.barrier()
    if rank.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank.rank == 0:
        lost(lambda: groups.tp.all_reduce(x), "all_reduce:", "rank 1")
    else:
        lost(lambda: groups.pp.recv(x, 1), "hop: lost rank 1")
        lost(lambda: groups.ep.exchange_counts([1] * rank.size), "counts:", "rank 1")


def waiting(rank: Rank) -> None:
    """All ranks wait in a sum for rank 0, which waits to be killed."""
    groups = rank.groups("waiting", library=native())
    print("ready", flush=True)
    if rank.rank == 0:
        time.sleep(LONG_S)
    groups.tp.all_reduce(torch.zeros(8, 576))


def main(case: str, rank: str, size: str, port: str) -> None:
    torch.set_num_threads(1)
    library = native()
    if library is not None:
        library.set_num_threads(1)
    cases = {"collectives": collectives, "faults": faults, "killed": killed, "waiting": waiting}
    cases[case](Rank(int(rank), int(size), int(port)))
    # The store's and gloo's threads need no orderly end.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
