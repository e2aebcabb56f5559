"""Who lives, as one reader judges it: by its own clock, and only while the store answers.

The clocks of other machines play no part, so none of them need be right. A lease is over when its counter has stood
still for its whole length; after the store was out of reach every lease begins anew.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..cluster.messages import ReplicaInfo


@dataclass(frozen=True, slots=True)
class Beat:
    """The latest heartbeat of a replica; ``count`` rises with each, or begins anew with an emptied store."""

    info: ReplicaInfo
    count: int
    ttl_s: float


@dataclass(slots=True)
class _Lease:
    beat: Beat
    since: float


class LeaseWatch:
    """``clock`` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._leases: dict[str, _Lease] = {}
        self._in_touch = True

    def lost_touch(self) -> None:
        """The store did not answer."""
        self._in_touch = False

    def judge(self, beats: Mapping[str, Beat], left: set[str]) -> list[ReplicaInfo]:
        """Whose lease holds, given the latest heartbeats and who gave the lease back.

        A replica that the store no longer knows keeps its lease: the store may have lost its memory.
        """
        now = self._clock()
        if not self._in_touch:
            self._in_touch = True
            for lease in self._leases.values():
                lease.since = now
        for name, beat in beats.items():
            lease = self._leases.get(name)
            if lease is None or (lease.beat.info.epoch, lease.beat.count) != (beat.info.epoch, beat.count):
                self._leases[name] = _Lease(beat, now)
        over = [name for name, lease in self._leases.items() if name in left or now - lease.since > lease.beat.ttl_s]
        alive = [lease.beat.info for name, lease in self._leases.items() if name not in over]
        for name in over:
            # A stopped counter that is still in the store must not look like a new one.
            if name not in beats:
                del self._leases[name]
        return alive
