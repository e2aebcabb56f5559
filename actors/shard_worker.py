"""A gang's ranks as Ray actors. Ray places and starts them; plans and tensors do not go through it."""

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import ray
import torch
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ..cluster.errors import EngineError, RankLostError, WarmrootError
from ..cluster.weights_update import NewWeights
from .new_weights import open_new
from .parallel.gang import Progress
from .parallel.gang_config import GangConfig, Meeting, RankReport, RankTimes, StoreAddress
from .parallel.rank import Rank
from .placement import Resources

_GRACE_S = 5.0
_T = TypeVar("_T")

logger = logging.getLogger(__name__)


class ShardWorker:
    """The actor that hosts one rank."""

    def __init__(self, rank: int, device: str) -> None:
        self._rank = Rank(rank, ray.util.get_node_ip_address(), torch.device(device))

    def serve_store(self, start_s: float) -> StoreAddress:
        """See ``Rank``."""
        return self._rank.serve_store(start_s)

    def join(self, config: GangConfig, meeting: Meeting) -> RankReport:
        """See ``Rank``."""
        return self._rank.join(config, meeting)

    def times(self) -> RankTimes:
        """See ``Rank``."""
        return self._rank.times()

    def prepare(self, new: NewWeights) -> str:
        """See ``Rank``."""
        return self._rank.prepare(new.version, open_new(new))

    def discard(self) -> None:
        """See ``Rank``."""
        self._rank.discard()

    def run(self) -> None:
        """See ``Rank``. The process ends with a leader or a peer that is lost: an idle actor would keep its memory."""
        try:
            self._rank.run(_leave)
        except Exception as error:
            _leave(error)


class ShardWorkers:
    """Implements ``Crew``."""

    def __init__(self, config: GangConfig, group: PlacementGroup, rank_resources: Resources) -> None:
        """Start the actors: a stage's in the bundle of its number."""
        self.config = config
        self.address: str = ray.util.get_node_ip_address()
        self._ended = threading.Event()
        self._runs: list[Any] = []
        body = cast(Any, ray.remote)(ShardWorker)
        others = {name: amount for name, amount in rank_resources.items() if name not in ("CPU", "GPU")}
        self._workers: list[Any] = [
            body.options(
                num_cpus=rank_resources.get("CPU", 0.0),
                num_gpus=rank_resources.get("GPU", 0.0),
                resources=others,
                max_restarts=0,
                max_concurrency=3,  # it tells of its times, and loads other weights, while it runs
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=place.stage, placement_group_capture_child_tasks=True
                ),
            ).remote(place.rank, "cuda" if rank_resources.get("GPU") else "cpu")
            for place in config.topology.places()
        ]

    def serve_store(self) -> StoreAddress:
        """See ``Crew``."""
        start_s = self.config.start_s
        asked = self._workers[0].serve_store.remote(start_s)
        return cast(StoreAddress, _guarded(0, lambda: ray.get(asked, timeout=start_s)))

    def join(self, meeting: Meeting, progress: Progress) -> list[RankReport]:
        """See ``Crew``. Tells of no progress."""
        end = time.monotonic() + self.config.start_s
        waiting = {worker.join.remote(self.config, meeting): rank for rank, worker in enumerate(self._workers)}
        reports: dict[int, RankReport] = {}
        while waiting:
            ready, _ = ray.wait(list(waiting), timeout=max(0.0, end - time.monotonic()))
            if not ready:
                raise RankLostError(f"{_names(list(waiting.values()))}: not ready in time")
            rank = waiting.pop(ready[0])
            reports[rank] = _guarded(rank, lambda ready=ready: ray.get(ready[0]))
        self._runs = [worker.run.remote() for worker in self._workers]
        return [reports[rank] for rank in sorted(reports)]

    def times(self) -> list[RankTimes]:
        """See ``Crew``."""
        return self._ask([worker.times.remote() for worker in self._workers], self.config.step_s)

    def prepare(self, new: NewWeights) -> str:
        """See ``Crew``."""
        return self._ask([worker.prepare.remote(new) for worker in self._workers], self.config.start_s)[0]

    def discard(self) -> None:
        """See ``Crew``."""
        self._ask([worker.discard.remote() for worker in self._workers], self.config.step_s)

    @staticmethod
    def _ask(asked: list[Any], within_s: float) -> list[Any]:
        """What every rank answers, when all have; raises what the first one raised."""
        ray.wait(asked, num_returns=len(asked), timeout=within_s)
        return [_guarded(rank, lambda ref=ref: ray.get(ref, timeout=0)) for rank, ref in enumerate(asked)]

    def kill(self) -> None:
        """See ``Crew``."""
        for worker in self._workers:
            ray.kill(worker, no_restart=True)

    def end(self) -> None:
        """See ``Crew``."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._wait()
        self.kill()
        self._wait()

    def _wait(self) -> None:
        """Until all ranks have left their loops, or died in them."""
        if self._runs:
            ray.wait(self._runs, num_returns=len(self._runs), timeout=_GRACE_S)


def _guarded(rank: int, call: Callable[[], _T]) -> _T:
    try:
        return call()
    except RayTaskError as error:
        cause = error.cause
        raise cause if isinstance(cause, WarmrootError) else EngineError(f"rank {rank}: {cause!r}") from error
    except RayActorError as error:
        raise RankLostError(f"rank {rank} has ended: {str(error).splitlines()[0]}") from error
    except GetTimeoutError:
        raise RankLostError(f"rank {rank} does not answer in time") from None


def _names(ranks: Sequence[int]) -> str:
    return " and ".join(f"rank {rank}" for rank in ranks)


def _leave(error: Exception) -> None:
    """The main thread may hang in a collective: end without it."""
    logger.error("the rank ends: %s", error)
    os._exit(1)
