"""The replicas that may be chosen, as columns of numbers: their latest word, their speed, what was sent to them."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..cluster.ids import BlockHash, ReplicaId
from ..cluster.messages import Load, ReplicaInfo
from .policy.base import Candidates, Column, Numbers, Places, RoutingRequest
from .policy.in_flight import Account
from .policy.rates import Kind, ReplicaRates

_FIRST_CAPACITY = 8
_LOAD = slice(Column.RUNNING, Column.MAX_NUM_SEQS + 1)
_RATES = slice(Column.PREFILL_FIXED_S, Column.DECODE_STEP_S + 1)
_SENT = slice(Column.UNFINISHED, Column.HEAD_SINCE + 1)


class KnownReplica(Protocol):
    """A replica, its latest word and its speed."""

    @property
    def info(self) -> ReplicaInfo:
        """What it announced."""
        ...

    @property
    def load(self) -> Load:
        """What it said last."""
        ...

    @property
    def rates(self) -> ReplicaRates:
        """What was learned of it."""
        ...


class Fleet:
    """A column for each replica. Columns stay dense: the last one moves into the place of one that leaves."""

    def __init__(self, tokens_per_id: int = 1) -> None:
        """``tokens_per_id``: see ``RoutingCore``."""
        self._tokens_per_id = tokens_per_id
        self.names: list[ReplicaId] = []
        self.version = 0
        """Rises whenever ``names`` change."""
        self.caches: dict[tuple[BlockHash, int], int] = {}
        """Replicas for each (namespace, block size): prompts are looked up in each of these once."""
        self._members: list[KnownReplica] = []
        self._loads: list[Load] = []
        self._places: dict[ReplicaId, int] = {}
        self._table: Numbers = np.zeros((len(Column), _FIRST_CAPACITY))
        self._kinds: list[Kind | None] = []
        self._alike: dict[int, slice | Places] = {}
        """By the id of a kind, which its members keep alive: their columns."""
        self._factors: Numbers = np.ones((3, _FIRST_CAPACITY))
        self._common: Numbers = np.ones((3, 1))

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: ReplicaId) -> bool:
        return name in self._places

    def member(self, name: ReplicaId) -> KnownReplica:
        """The replica of that name, as it was put in."""
        return self._members[self._places[name]]

    def place(self, name: ReplicaId) -> int | None:
        """Its column."""
        return self._places.get(name)

    def join(self, member: KnownReplica, account: Account) -> None:
        """Take a replica in. Its name must be new."""
        place = len(self.names)
        if place == self._table.shape[1]:
            self._table = np.concatenate([self._table, np.zeros_like(self._table)], axis=1)
            self._factors = np.concatenate([self._factors, np.ones_like(self._factors)], axis=1)
        info = member.info
        self.names.append(info.replica)
        self.version += 1
        self._members.append(member)
        self._loads.append(member.load)
        self._kinds.append(None)
        self._alike.clear()
        self._places[info.replica] = place
        key = _cache_of(info)
        self.caches[key] = self.caches.get(key, 0) + 1
        kv_tokens = info.kv_total_blocks * info.block_size * self._tokens_per_id
        self._table[Column.KV_TOTAL_TOKENS, place] = max(1, kv_tokens)
        self._table[Column.MAX_MODEL_LEN, place] = info.max_model_len
        self._write_load(place, member.load)
        self.learned(info.replica)
        self.sent(info.replica, account)

    def leave(self, name: ReplicaId) -> None:
        """Take a replica out; one that is not there is no error."""
        place = self._places.pop(name, None)
        if place is None:
            return
        self.version += 1
        key, last = _cache_of(self._members[place].info), len(self.names) - 1
        self.caches[key] -= 1
        if not self.caches[key]:
            del self.caches[key]
        self._alike.clear()
        for column in (self.names, self._members, self._loads, self._kinds):
            column[place] = column[last]  # pyright: ignore[reportArgumentType, reportCallIssue]
            column.pop()
        if place != last:
            for numbers in (self._table, self._factors):
                numbers[:, place] = numbers[:, last]
            self._places[self.names[place]] = place

    def told(self, place: int, load: Load) -> None:
        """Note a replica's latest word; cheap if it is the same object as before."""
        if load is not self._loads[place]:
            self._loads[place] = load
            self._write_load(place, load)

    def listen(self) -> None:
        """Note everyone's latest word."""
        for place, load in enumerate([member.load for member in self._members]):
            if load is not self._loads[place]:
                self.told(place, load)

    def learned(self, name: ReplicaId) -> None:
        """Note what a replica's rates are now, and with it those of its kind."""
        place = self._places.get(name)
        if place is None:
            return
        rates = self._members[place].rates
        kind, factors, common = rates.kind, self._factors, self._common
        if self._kinds[place] is not kind:
            self._kinds[place] = kind
            self._alike.clear()
        factors[0, place] = factors[1, place] = rates.prefill_factor
        factors[2, place] = rates.step_factor
        common[0, 0], common[1, 0], common[2, 0] = kind.fixed_s, kind.token_s, kind.decode_step_s
        places = self._places_of(kind)
        self._table[_RATES, places] = common * factors[:, places]

    def _places_of(self, kind: Kind) -> "slice | Places":
        """Columns of a kind. Most fleets are of one, and a slice is written much faster than places picked out."""
        found = self._alike.get(id(kind))
        if found is None:
            alike = [place for place, other in enumerate(self._kinds) if other is kind]
            found = slice(len(self.names)) if len(alike) == len(self.names) else np.array(alike, dtype=np.intp)
            self._alike[id(kind)] = found
        return found

    def sent(self, name: ReplicaId, account: Account) -> None:
        """Note what is in flight to a replica."""
        place = self._places.get(name)
        if place is not None:
            self._table[_SENT, place] = (
                account.unfinished,
                account.context_tokens,
                account.sent_tokens,
                account.sent_s,
                account.head_s,
                account.head_since,
            )

    def candidates(self, now: float) -> Candidates:
        """All of them, with nothing cached."""
        count = len(self.names)
        return Candidates(self.names, self._table[:, :count], np.zeros(count), now)

    def unfit(self, request: RoutingRequest) -> "NDArray[np.bool_] | None":
        """Those that have no room for a request's whole context, or that it is to avoid. None: all alike."""
        unfit = self._table[Column.MAX_MODEL_LEN, : len(self.names)] < request.context_tokens
        for place in map(self._places.get, request.avoid):
            if place is not None:
                unfit[place] = True
        return unfit if unfit.any() and not unfit.all() else None

    def with_other_weights(self, request: RoutingRequest) -> "NDArray[np.bool_] | None":
        """Those whose weights are not what a request has begun with. None: all alike, or it has not begun."""
        if request.weights is None:
            return None
        others = np.array([member.info.weights != request.weights for member in self._members], dtype=np.bool_)
        return others if others.any() and not others.all() else None

    def _write_load(self, place: int, load: Load) -> None:
        usage = load.kv_usage
        self._table[_LOAD, place] = (load.running, load.waiting, load.waiting_tokens, usage, load.max_num_seqs)


def _cache_of(info: ReplicaInfo) -> tuple[BlockHash, int]:
    return BlockHash(info.kv_namespace), info.block_size
