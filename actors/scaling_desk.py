"""Where routers leave what they have to do, and the autoscaling policy what it decided: in the bus's actor.

It is not a part of the bus: replicas must come and go while Redis is away, too.
"""

import asyncio
import logging
import time
import uuid
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayError

from ..cluster.demand import FORGET_S, Demand
from ..cluster.scaling import Decision
from ..cluster.scaling_status import ScalingStatus, first_status
from ..router.demand import demand_of
from ..router.dispatch import Dispatcher
from ..router.serve_router import BUS_ACTOR, BUS_NAMESPACE

TELL_S = 1.0
"""How often a router tells, and the policy asks."""
_RETRY_S = 5.0

logger = logging.getLogger(__name__)


class ScalingDesk:
    """Words that were told and not yet asked for, and the state of each model's scaling. ``clock`` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._demands: defaultdict[str, dict[str, tuple[float, Demand]]] = defaultdict(dict)
        self._statuses: dict[str, ScalingStatus] = {}

    def tell(self, model: str, demand: Demand) -> ScalingStatus | None:
        """A router's latest word of a model. Returns what was decided; None: nobody decides."""
        demands = self._fresh(model)
        demands.pop(demand.router, None)  # the latest word is the last one
        demands[demand.router] = self._clock(), demand
        return self._statuses.get(model)

    def ask(self, model: str, decided: Decision | None) -> list[Demand]:
        """What routers told since the last time. ``decided``: by who asks, from what it was told then."""
        if decided is not None:
            status = self._statuses.get(model)
            self._statuses[model] = first_status(model, decided) if status is None else status.then(decided)
        demands = self._fresh(model)
        del self._demands[model]
        return [demand for _, demand in demands.values()]

    def _fresh(self, model: str) -> dict[str, tuple[float, Demand]]:
        """Without words that are too old to be of now: routers end, and nobody may ask for as long as they came."""
        demands, oldest = self._demands[model], self._clock() - FORGET_S
        while demands and (first := next(iter(demands.items())))[1][0] < oldest:
            del demands[first[0]]
        return demands


class DemandTeller:
    """Tells the desk what one router has to do, from ``start`` to ``close``; ``decided`` hears what comes of it."""

    def __init__(
        self, model: str, dispatcher: Dispatcher, decided: Callable[[ScalingStatus], None] = lambda status: None
    ) -> None:
        self._model = model
        self._dispatcher = dispatcher
        self._decided = decided
        self._name = uuid.uuid4().hex
        self._desk: Any = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Call it on the router's event loop."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    def close(self) -> None:
        """The policy forgets this router once it misses its words."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(TELL_S if await self._tell() else _RETRY_S)

    async def _tell(self) -> bool:
        """Whether it was told: the desk may be away."""
        if not ray.is_initialized():  # this process is leaving its cluster, and Ray would start one for the next call
            return False
        try:
            if self._desk is None:
                # It asks the GCS and waits: not on the event loop that routes.
                self._desk = await asyncio.to_thread(ray.get_actor, BUS_ACTOR, BUS_NAMESPACE)
            status = await self._desk.tell_demand.remote(self._model, self._demand())
            if status is not None:
                self._decided(status)
        except (ValueError, RayError) as error:
            logger.debug("the demand cannot be told: %s", error)
        except Exception:
            if ray.is_initialized():  # else it left meanwhile
                logger.exception("the demand cannot be told; going on")
        else:
            return True
        self._desk = None
        return False

    def _demand(self) -> Demand:
        core, stats = self._dispatcher.sync(), self._dispatcher.routing()
        # What waits for a first replica is counted there, but has not come to the core.
        held, held_tokens = stats.waiting - core.num_waiting, stats.waiting_tokens - core.waiting_tokens
        return demand_of(core, self._name, held=held, held_tokens=held_tokens)
