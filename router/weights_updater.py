"""Gives all replicas of a model other weights: all load and check them first, and only then do they change.

Whatever fails before that leaves every replica as it was. Afterwards a replica can only fail to change in time, or be
lost; the error then says who holds what, and the same update may be asked for again: who holds it has nothing to do.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..cluster.errors import (
    ConfigError,
    InvalidRequestError,
    ModelLoadError,
    ReplicaLostError,
    ReplicaUnavailableError,
    WarmrootError,
    WeightsUpdateError,
)
from ..cluster.weights_update import NewWeights, ReplicaWeights, UpdateMode, WeightsReport
from .membership import Member

LOAD_S = 3600.0
"""How long replicas may load."""
AWAY_S = 10.0
"""A replica that is out of reach for longer still has its lease: it lives, and would come back with its old weights."""
LOOK_AGAIN_S = 0.2
MARGIN_S = 30.0
"""A replica's answer may come so much later than it was to change."""


class WeightsUpdater:
    """Of one model, in one router. ``leased`` tells who has the model, reachable or not."""

    def __init__(
        self,
        leased: Callable[[], Sequence[Member]],
        clock: Callable[[], float] = time.monotonic,
        away_s: float = AWAY_S,
    ) -> None:
        self._leased = leased
        self._clock = clock
        self._away_s = away_s
        self._task: asyncio.Task[WeightsReport] | None = None
        self.stage = ""
        """What the update that is under way is at; empty: none is."""

    async def update(
        self, new: NewWeights, *, mode: UpdateMode = "wait", one_by_one: bool = False, timeout_s: float = 600.0
    ) -> WeightsReport:
        """Load ``new`` everywhere, then change: together, or ``one_by_one`` while the others go on.

        With ``wait`` a replica changes when its running requests have ended, for which they have ``timeout_s``. Raises
        InvalidRequestError for weights that do not suit, ReplicaUnavailableError when not all replicas can be reached;
        then none has changed. Raises WeightsUpdateError when some have. It goes on to its end when nobody waits for it
        any more: half an update would leave replicas with different weights.
        """
        if self._task is not None and not self._task.done():
            raise InvalidRequestError("another update of the model's weights is under way")
        self._task = asyncio.ensure_future(self._update(new, mode, one_by_one, timeout_s))
        return await asyncio.shield(self._task)

    async def _update(self, new: NewWeights, mode: UpdateMode, one_by_one: bool, timeout_s: float) -> WeightsReport:
        try:
            members = await self._members()
            began = self._clock()
            self.stage = f"{len(members)} replicas load {new.model or new.actor}"
            version = await self._prepare(members, new)
            load_s = self._clock() - began
            self.stage = f"{len(members)} replicas change to {version}"
            outcome = _Outcome(version)
            for group in [[member] for member in members] if one_by_one else [members]:
                asked = [self._adopt(member, version, mode, timeout_s) for member in group]
                outcome.add(group, await _all(asked))
                if outcome.failed:
                    break
            else:
                await self._catch_up(outcome, new, mode, timeout_s)
            if outcome.failed or not outcome.changed:
                await self._discard(self._leased())
                raise outcome.error(self._leased())
            return WeightsReport(
                weights_version=version,
                load_s=load_s,
                replicas=tuple(outcome.changed.values()),
                lost=tuple(outcome.lost),
            )
        finally:
            self.stage = ""

    async def _members(self) -> list[Member]:
        """All that live and stay, once all can be reached."""
        give_up_at = self._clock() + self._away_s
        while True:
            members = self._staying()
            away = [member.info.replica for member in members if not member.client.connected]
            if not away or self._clock() >= give_up_at:
                break
            await asyncio.sleep(LOOK_AGAIN_S)
        if away or not members:
            missing = f"{', '.join(away)} cannot be reached" if away else "the model has no replica"
            raise ReplicaUnavailableError(f"{missing}: no weights have changed")
        return members

    def _staying(self) -> list[Member]:
        return [member for member in self._leased() if not member.client.draining]

    async def _catch_up(self, outcome: "_Outcome", new: NewWeights, mode: UpdateMode, timeout_s: float) -> None:
        """Change those too that were announced while the others loaded, or were lost and are back.

        Who starts after the first has changed begins with the new weights. Who was announced before that is known here
        by the time that the others are known to have changed, which is what this waits for.
        """
        give_up_at = self._clock() + self._away_s
        while behind := [one for one in self._staying() if one.info.weights_version != outcome.version]:
            behind = [one for one in behind if one.info.replica not in outcome.changed]
            late = [one for one in behind if one.client.connected]
            outcome.add(late, await _all([self._change(one, outcome.version, new, mode, timeout_s) for one in late]))
            if outcome.failed:
                return
            if self._clock() >= give_up_at:
                break
            await asyncio.sleep(LOOK_AGAIN_S)
        for one in behind:
            if one.info.replica not in outcome.changed and one.info.replica not in outcome.lost:
                outcome.failed[one.info.replica] = ReplicaUnavailableError("cannot be reached")

    async def _change(
        self, member: Member, version: str, new: NewWeights, mode: UpdateMode, timeout_s: float
    ) -> ReplicaWeights:
        try:
            await member.client.ask("prepare_weights", asdict(new), LOAD_S)
            return await self._adopt(member, version, mode, timeout_s)
        except ReplicaUnavailableError as error:  # it is about to be ready, or was lost this moment
            raise ReplicaLostError(error.message) from error

    async def _prepare(self, members: Sequence[Member], new: NewWeights) -> str:
        """The version, once all have it beside their own."""
        found = await _all([member.client.ask("prepare_weights", asdict(new), LOAD_S) for member in members])
        errors = {member.info.replica: one for member, one in zip(members, found, strict=True) if _is_error(one)}
        versions = {str(one["weights_version"]) for one in found if not _is_error(one)}
        if not errors and len(versions) == 1:
            return versions.pop()
        await self._discard(members)
        if not errors:
            raise InvalidRequestError(
                f"replicas find different weights there ({', '.join(sorted(versions))}): none has changed",
                param="model",
            )
        replica, error = next(iter(errors.items()))
        message = f"no replica has changed its weights: {replica}: {error.message}"
        if isinstance(error, (ModelLoadError, ConfigError)):
            raise InvalidRequestError(message, param="actor" if new.actor else "model") from error
        error.message, error.args = message, (message,)
        raise error

    async def _adopt(self, member: Member, version: str, mode: UpdateMode, timeout_s: float) -> ReplicaWeights:
        arguments = {"version": version, "mode": mode, "timeout_s": timeout_s}
        answer = await member.client.ask("adopt_weights", arguments, timeout_s + MARGIN_S)
        return ReplicaWeights(
            replica=member.info.replica, weights_version=version, seconds=float(answer.get("seconds", 0.0))
        )

    async def _discard(self, members: Sequence[Member]) -> None:
        await _all([member.client.ask("discard_weights", {}, MARGIN_S) for member in members])


async def _all(asked: Sequence[Awaitable[Any]]) -> list[Any]:
    """What each gave, or the WarmrootError that it raised."""
    found = await asyncio.gather(*asked, return_exceptions=True)
    for one in found:
        if isinstance(one, BaseException) and not isinstance(one, WarmrootError):
            raise one
    return list(found)


def _is_error(found: object) -> bool:
    return isinstance(found, WarmrootError)


@dataclass(slots=True)
class _Outcome:
    """What became of each replica."""

    version: str
    changed: dict[str, ReplicaWeights] = field(default_factory=dict[str, ReplicaWeights])
    lost: dict[str, None] = field(default_factory=dict[str, None])
    failed: dict[str, WarmrootError] = field(default_factory=dict[str, WarmrootError])

    def add(self, members: Sequence[Member], found: Sequence[Any]) -> None:
        """What each of them gave or raised."""
        for member, one in zip(members, found, strict=True):
            replica = member.info.replica
            if isinstance(one, ReplicaLostError):
                self.lost[replica] = None
            elif isinstance(one, WarmrootError):
                self.failed[replica] = one
            else:
                self.changed[replica] = one
                self.lost.pop(replica, None)

    def error(self, leased: Sequence[Member]) -> WarmrootError:
        """Says who holds what."""
        told = [f"{replica}: {error.message}" for replica, error in self.failed.items()]
        told += [f"{replica} was lost" for replica in self.lost]
        told += [f"{replica} holds {self.version}" for replica in sorted(self.changed)]
        others = [member.info for member in leased if member.info.replica not in self.changed | self.lost]
        told += [f"{info.replica} holds {info.weights_version}" for info in others]
        return WeightsUpdateError(f"not all replicas have changed to {self.version}: {'; '.join(told)}")
