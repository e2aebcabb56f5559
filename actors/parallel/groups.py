"""Makes the groups of a rank: tensor, pipeline and expert parallel, and one of all ranks for control."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from ...cluster.errors import RankLostError
from ...cluster.topology import Topology
from ..kernels.library import NativeLibrary
from .collectives import Collectives
from .shared_memory import SharedMemoryGroup, can_share_memory, segment_bytes, share_file
from .solo import SoloGroup
from .torch_group import gloo_group, gloo_transport, nccl_group
from .traffic import Traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """The groups that one rank is in. ``control`` is always between CPUs."""

    tp: Collectives
    pp: Collectives
    ep: Collectives
    control: Collectives
    traffic: Traffic

    def close(self) -> None:
        """Leave all of them."""
        for group in (self.tp, self.pp, self.ep, self.control):
            group.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLists:
    """Who is in the groups of one rank: ranks of the gang, in the order of the group, this rank among them."""

    tp: Sequence[int]
    pp: Sequence[int]
    ep: Sequence[int]
    control: Sequence[int]

    @classmethod
    def of(cls, topology: Topology, rank: int) -> "RankLists":
        """Those of a rank of ``topology``."""
        return cls(
            tp=_holding(rank, topology.tp_groups),
            pp=_holding(rank, topology.pp_groups),
            ep=_holding(rank, topology.ep_groups),
            control=topology.control_group,
        )


def make_groups(
    rank: int,
    members: RankLists,
    store: Store,
    *,
    address: str,
    device: torch.device,
    library: NativeLibrary | None,
    deadline_s: float,
    traffic: Traffic | None = None,
) -> Groups:
    """Join this rank's groups; every rank of the gang must do so at the same time.

    ``address`` is this machine's, as the other ranks reach it. GPUs use NCCL. On CPUs the ranks of a tensor-parallel
    group that have one address reduce in shared memory if all of them have the native ``library``, and gloo carries the
    rest. Raises RankLostError if a peer does not come within ``deadline_s``, which is each later operation's too.
    """
    traffic = traffic or Traffic()
    maker = _Maker(rank, store, address, device, library, deadline_s, traffic)
    return Groups(
        tp=maker.tensor_parallel(members.tp),
        pp=maker.group("pp", members.pp),
        ep=maker.group("ep", members.ep),
        control=maker.group("control", members.control, control=True),
        traffic=traffic,
    )


class _Maker:
    def __init__(
        self,
        rank: int,
        store: Store,
        address: str,
        device: torch.device,
        library: NativeLibrary | None,
        deadline_s: float,
        traffic: Traffic,
    ) -> None:
        self._rank = rank
        self._store = store
        self._device = device
        self._library = library
        self._deadline_s = deadline_s
        self._traffic = traffic
        self._transport: Any = gloo_transport(address)
        shares = device.type == "cpu" and can_share_memory(library)
        self._host = address if shares else f"rank {rank} shares no memory"
        store.set(f"host/{rank}", self._host)

    def group(self, kind: str, ranks: Sequence[int], *, control: bool = False) -> Collectives:
        if len(ranks) == 1:
            return SoloGroup()
        on_gpu = self._device.type == "cuda" and not control
        join = partial(nccl_group, device=self._device) if on_gpu else partial(gloo_group, transport=self._transport)
        return join(
            self._own_store(kind, ranks),
            ranks.index(self._rank),
            _names(ranks),
            deadline_s=self._deadline_s,
            traffic=self._traffic,
        )

    def tensor_parallel(self, ranks: Sequence[int]) -> Collectives:
        inner = self.group("tp", ranks)
        if len(ranks) == 1 or self._library is None or not self._all_on_this_host(ranks):
            return inner
        fd = share_file(
            self._own_store("tp memory", ranks),
            inner.rank,
            inner.size,
            segment_bytes(self._library, inner.size),
            deadline_s=self._deadline_s,
        )
        return SharedMemoryGroup(
            inner, self._library, fd, _names(ranks), deadline_s=self._deadline_s, traffic=self._traffic
        )

    def _all_on_this_host(self, ranks: Sequence[int]) -> bool:
        try:
            return all(self._store.get(f"host/{rank}").decode() == self._host for rank in ranks)
        except RuntimeError as error:
            raise RankLostError(f"joining {', '.join(_names(ranks))}: {str(error).splitlines()[0]}") from error

    def _own_store(self, kind: str, ranks: Sequence[int]) -> Store:
        return PrefixStore(f"{kind}/{','.join(map(str, ranks))}", self._store)


def _holding(rank: int, groups: Sequence[Sequence[int]]) -> Sequence[int]:
    return next(group for group in groups if rank in group)


def _names(ranks: Sequence[int]) -> list[str]:
    return [f"rank {rank}" for rank in ranks]
