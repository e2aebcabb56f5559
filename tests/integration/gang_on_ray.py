"""A gang of Ray actors, from placement to a lost rank: ``gang_on_ray.py MODEL_FOLDER``. Prints as JSON what it met."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from gang_place import place

from warmroot.actors.engine.plan import StepPlan
from warmroot.actors.parallel.gang import start_gang
from warmroot.actors.parallel.gang_config import GangConfig
from warmroot.actors.runner.calibration import calibrate
from warmroot.actors.runner.load import KvMemoryConfig
from warmroot.actors.shard_worker import ShardWorkers
from warmroot.cluster.errors import ReplicaUnavailableError
from warmroot.cluster.topology import Topology
from warmroot.deploy.local_ray import ensure_ray, stop_local_ray

RANK = {"CPU": 1.0}


def main(folder: str) -> list[str]:
    met: list[str] = []
    ensure_ray(address=None, num_cpus=2)
    try:
        try:
            place(Topology(tp=1000), RANK, deadline_s=0.5)
        except ReplicaUnavailableError as error:
            met.append(error.message)
        config = GangConfig(
            path=Path(folder),
            topology=Topology(tp=2),
            kv=KvMemoryConfig(block_size=4, num_kv_blocks=40),
            threads_per_rank=1,
            dtype="float32",
        )
        met += run(config)
    finally:
        stop_local_ray()
    return met


def wait_until(condition: Callable[[], bool]) -> None:
    """Ray reaps its workers a moment after they end."""
    end = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def run(config: GangConfig) -> list[str]:
    group = place(config.topology, RANK, deadline_s=60.0)
    gang = start_gang(ShardWorkers(config, group, RANK))
    calibrate(gang)
    assert all(times.busy_s > 0 for times in gang.times())
    os.kill(gang.ranks()[1].pid, signal.SIGKILL)
    error = None
    while error is None:
        gang.submit(StepPlan(step=100))
        error = gang.result().error
        time.sleep(0.01)
    gang.shutdown()
    wait_until(lambda: not any(Path(f"/proc/{state.pid}").exists() for state in gang.ranks()))
    return [error]


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
