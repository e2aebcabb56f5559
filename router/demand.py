"""Reads off a routing core what it has to do."""

from ..cluster.demand import Demand
from .core import RoutingCore
from .policy.base import Column
from .work import Backlog, Speed


def demand_of(core: RoutingCore, router: str, *, held: int = 0, held_tokens: int = 0) -> Demand:
    """``held`` requests with ``held_tokens`` in their prompts wait for a first replica, outside the core."""
    unfinished, queued, queued_s = core.in_flight.queued()
    line, line_tokens = core.num_waiting + held, core.waiting_tokens + held_tokens
    backlog = Backlog(
        in_flight=unfinished + line,
        line=line,
        line_tokens=line_tokens,
        queued=queued,
        queued_s=queued_s,
    )
    fleet = core.fleet
    return core.work.demand(router, backlog, _speed(core), [(name, fleet.member(name).load) for name in fleet.names])


def _speed(core: RoutingCore) -> Speed | None:
    if not len(core.fleet):
        return None
    table = core.fleet.candidates(0.0).table
    return Speed(
        fixed_s=float(table[Column.PREFILL_FIXED_S].mean()),
        token_s=float(table[Column.PREFILL_TOKEN_S].mean()),
        step_s=float(table[Column.DECODE_STEP_S].mean()),
    )
