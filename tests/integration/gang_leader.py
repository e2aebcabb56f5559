"""The leader of a gang as a process of its own: ``gang_leader.py MODEL_FOLDER``. Prints its ranks, then waits."""

import sys
import time
from pathlib import Path

from warmroot.actors.parallel.gang import start_gang
from warmroot.actors.parallel.gang_config import GangConfig
from warmroot.actors.parallel.spawn import RankProcesses
from warmroot.actors.runner.load import KvMemoryConfig
from warmroot.cluster.topology import Topology

if __name__ == "__main__":
    config = GangConfig(
        path=Path(sys.argv[1]),
        topology=Topology(tp=2),
        kv=KvMemoryConfig(block_size=4, num_kv_blocks=16),
        threads_per_rank=1,
        dtype="float32",
    )
    crew = RankProcesses(config)
    print(*crew.pids, flush=True)
    gang = start_gang(crew)
    print("ready", flush=True)
    time.sleep(600.0)
