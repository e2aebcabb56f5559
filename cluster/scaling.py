"""How many replicas a model shall have, and why: a pure function of its demand, its limits and what was decided before.

The signal that needs the most counts (``needs.py``). More replicas are started once they were needed throughout
``upscale_delay``, as many as were needed all that time; some are stopped once fewer would have done throughout
``downscale_delay``, with something to spare. Needs do not depend on how many replicas there are, so what was decided
does not call for its opposite. What is remembered is short and may be lost: who begins anew waits for whole delays.
"""

from dataclasses import dataclass, replace
from math import ceil, inf

from .autoscaling_config import AutoscalingConfig
from .demand import WINDOW_S, Figures
from .needs import NOTHING, Fleet, Need, lasting, passing

START_S = 30.0
"""What a replica is taken to need to start as long as none was seen to."""
SLACK = 0.8
"""Fewer replicas must do with that share of what they may be loaded with."""
_SETTLE_S = 15.0
"""After replicas were stopped the next step waits for what it does to the others."""
_LEAST_START_S = 1.0
_EPSILON = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """How many replicas there shall be from now on."""

    at: float
    """Wall clock, in seconds."""
    before: int
    target: int
    ready: int
    needed: float
    """Replicas that the strongest signal needs now."""
    signal: str
    """Which one: one of ``SIGNALS``."""
    reasons: tuple[str, ...]
    """Short sentences with the numbers, the decisive one first."""


SIGNALS = ("arriving", "waiting", "kv", "slots", "itl", "ttft", "idle", "unknown")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingState:
    """What is remembered from one decision to the next."""

    up_since: float | None = None
    """Since when more replicas are needed than there shall be, and the least number that was."""
    up_least: float = inf
    down_since: float | None = None
    """Since when fewer would do, and the largest number that was needed meanwhile."""
    down_most: float = 0.0
    raises: tuple[tuple[float, int], ...] = ()
    """When replicas began to start that are not ready, and how many there shall be with them; oldest first."""
    lowered_at: float = -inf
    served: tuple[tuple[float, int], ...] = ()
    """Since when so many replicas were ready, within ``WINDOW_S``; oldest first."""
    seen_start_s: float | None = None
    """What a replica needed to start, as last seen."""

    @property
    def start_s(self) -> float:
        """What the next one will need."""
        return START_S if self.seen_start_s is None else self.seen_start_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What is there when it is decided. ``now`` is monotonic, ``wall`` for who reads of it."""

    ready: int
    target: int
    """Replicas that there shall be: what is not ready of them is starting."""
    now: float
    wall: float = 0.0
    least: int = 0
    most: int
    give_up_s: float = inf
    """When none has come up for so long, none will: Serve tries a few times, and then not until it is asked anew."""


def decide(
    config: AutoscalingConfig, figures: Figures | None, state: ScalingState, moment: Moment
) -> tuple[Decision, ScalingState]:
    """The decision, and what to remember. Without ``figures`` nothing is known, and only the bounds count."""
    state = _with_served(_with_starts(state, moment), moment)
    if figures is None:
        silence = Need(moment.target, "unknown", "no router tells of its work")
        state = replace(state, up_since=None, down_since=None)
        return _bounded(moment.target, silence, [], moment), state
    fleet = _fleet(state, moment)
    now_needed = [*lasting(config, figures, fleet)]
    soon_gone = [*passing(config, figures, fleet)]
    up = max([NOTHING, *now_needed, *soon_gone])
    spared = [Need(need.replicas / SLACK, need.signal, need.reason) for need in now_needed]
    down = max([NOTHING, *spared, *soon_gone])
    state = _with_needs(state, up.replicas, down.replicas, moment)
    target, need, notes = _wanted(config, figures, state, up, down, moment)
    decision = _bounded(target, need, notes, moment)
    if decision.target < moment.target:
        state = replace(state, lowered_at=moment.now)
    if decision.target > moment.target:
        state = replace(state, up_since=None, raises=(*state.raises, (moment.now, decision.target)))
    return decision, state


def _wanted(
    config: AutoscalingConfig, figures: Figures, state: ScalingState, up: Need, down: Need, moment: Moment
) -> tuple[int, Need, list[str]]:
    """How many, because of which need, and what else is to be said of it."""
    target, now = moment.target, moment.now
    idle_s = min(figures.idle_s, now - state.served[-1][0])  # whoever a replica was started for may still be on the way
    idle = Need(0.0, "idle", f"no request for {figures.idle_s:.0f} s")
    if not target:  # what came lately has been served: only who waits calls for the first one
        need = Need(max(1.0, up.replicas), "waiting", f"{figures.waiting} requests wait for the first replica")
        return (1, need, []) if figures.waiting else (0, idle, [])
    if not (moment.ready or moment.least) and now - state.raises[0][0] > moment.give_up_s:
        failed = Need(0.0, "waiting", f"no replica has come up for {now - state.raises[0][0]:.0f} s")
        return 0, failed, ["it is begun anew"]
    if state.up_since is not None and now - state.up_since >= config.upscale_delay:
        wanted, step = _whole(state.up_least), config.max_upscale_step or max(1, moment.ready)
        allowed = max(target, min(wanted, moment.ready + step))
        return allowed, up, [f"{wanted} are needed, {step} may start at once"] if allowed < wanted else []
    if target == 1 and not figures.in_flight and not moment.least:
        return (0 if idle_s >= config.scale_to_zero_delay else target), idle, []
    if state.down_since is not None and now - state.down_since >= _patience_s(config, state):
        wanted = max(1, _whole(state.down_most))
        if wanted < target and now - state.lowered_at >= _SETTLE_S:
            note = f"{wanted} would have done for {now - state.down_since:.0f} s"
            return max(wanted, target - config.max_downscale_step), down, [note]
    return target, up, []


def _patience_s(config: AutoscalingConfig, state: ScalingState) -> float:
    """What takes long to start is not stopped because of a short lull."""
    return max(config.downscale_delay, 2 * state.start_s)


def _bounded(target: int, need: Need, notes: list[str], moment: Moment) -> Decision:
    bounded = min(moment.most, max(moment.least, target))
    if bounded != target:
        notes = [*notes, f"{bounded} is the {'most' if bounded < target else 'least'} allowed"]
    return Decision(
        at=moment.wall,
        before=moment.target,
        target=bounded,
        ready=moment.ready,
        needed=need.replicas,
        signal=need.signal,
        reasons=(need.reason, *notes),
    )


def _fleet(state: ScalingState, moment: Moment) -> Fleet:
    starting = max(0, moment.target - moment.ready)
    ready_in_s = state.raises[0][0] + state.start_s - moment.now if state.raises else 0.0
    served = min(ready for _, ready in state.served)
    return Fleet(moment.ready, starting, state.start_s, max(0.0, ready_in_s), served)


def _with_served(state: ScalingState, moment: Moment) -> ScalingState:
    served = state.served
    if not served or served[-1][1] != moment.ready:
        served = (*served, (moment.now, moment.ready))
    while len(served) > 1 and moment.now - served[1][0] >= WINDOW_S:
        served = served[1:]
    return replace(state, served=served)


def _with_starts(state: ScalingState, moment: Moment) -> ScalingState:
    """Learn how long replicas take to start: those that did, not those that were called off."""
    seen, starting = state.seen_start_s, moment.ready < moment.target
    raises = [(at, min(level, moment.target)) for at, level in state.raises if starting or level <= moment.target]
    while raises and moment.ready >= raises[0][1]:
        start_s = max(_LEAST_START_S, moment.now - raises.pop(0)[0])
        seen = start_s if seen is None else (seen + start_s) / 2
    if starting and not raises:  # one was lost, or this begins anew
        raises = [(moment.now, moment.target)]
    return replace(state, raises=tuple(raises), seen_start_s=seen)


def _with_needs(state: ScalingState, up: float, down: float, moment: Moment) -> ScalingState:
    if _whole(up) > moment.target:
        since = moment.now if state.up_since is None else state.up_since
        least = up if state.up_since is None else min(state.up_least, up)
        state = replace(state, up_since=since, up_least=least)
    else:
        state = replace(state, up_since=None)
    most = down if state.down_since is None else max(state.down_most, down)
    if _whole(down) >= moment.target:
        return replace(state, down_since=None)
    if state.down_since is not None and _whole(most) >= moment.target:
        return replace(state, down_since=moment.now, down_most=down)
    return replace(state, down_since=moment.now if state.down_since is None else state.down_since, down_most=most)


def _whole(replicas: float) -> int:
    return ceil(replicas - _EPSILON)
