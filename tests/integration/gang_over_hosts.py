"""A gang over the hosts of a Ray cluster: ``gang_over_hosts.py RAY_ADDRESS MODEL_FOLDER NUM_NODES``.

Builds it, takes steps until it is lost, clears it away, and starts again for each line of its input. Tells of all this
in lines of JSON with the time.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import ray
from gang_place import place

from warmroot.actors.engine.plan import StepPlan
from warmroot.actors.parallel.gang import GangExecutor, start_gang
from warmroot.actors.parallel.gang_config import GangConfig
from warmroot.actors.runner.calibration import calibrate
from warmroot.actors.runner.load import KvMemoryConfig
from warmroot.actors.shard_worker import ShardWorkers
from warmroot.cluster.topology import Topology

RANK = {"CPU": 1.0}
FIRST_STEP = 1000
BUILD_S = 300.0
"""A node that has died must come back first, on a machine that does much else."""


def main(address: str, folder: str, num_nodes: str) -> None:
    ray.init(address=address, log_to_driver=False)
    wait_until(lambda: sum(node["Alive"] for node in ray.nodes()) == int(num_nodes))
    config = GangConfig(
        path=Path(folder),
        topology=Topology(tp=2, pp=2),
        kv=KvMemoryConfig(block_size=4, num_kv_blocks=40),
        threads_per_rank=1,
        dtype="float32",
    )
    while True:
        live_and_die(config)
        if not sys.stdin.readline():
            return


def live_and_die(config: GangConfig) -> None:
    group = place(config.topology, RANK, deadline_s=BUILD_S)
    try:
        gang = start_gang(ShardWorkers(config, group, RANK))
        try:
            calibrate(gang)
            tell("ready", ranks=[asdict(state) for state in gang.ranks()])
            tell("lost", error=step_until_lost(gang))
        finally:
            gang.shutdown()
    finally:
        ray.util.remove_placement_group(group)
    wait_until(lambda: ray.util.placement_group_table(group)["state"] == "REMOVED")
    tell("ended")


def step_until_lost(gang: GangExecutor) -> str:
    step = FIRST_STEP
    while True:
        gang.submit(StepPlan(step=step))
        error = gang.result().error
        if error is not None:
            return error
        step += 1
        time.sleep(0.01)


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + BUILD_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def tell(event: str, **details: object) -> None:
    # A line of its own, whatever Ray is writing from another thread.
    sys.stdout.write("\n" + json.dumps({"event": event, "at": time.time(), **details}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
