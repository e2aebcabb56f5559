"""A Ray of this machine with a dashboard, as a process of its own, which applications are submitted to."""

import os
import signal
import sys
import tempfile
from pathlib import Path

from warmroot.cluster.config import WarmrootConfig
from warmroot.deploy import sweeper
from warmroot.deploy.local_ray import _loopback, own_places
from warmroot.deploy.ray_settings import SETTINGS, of_endpoint

NUM_CPUS = 8.0
"""What Ray may give away, whatever the machine has: old and new replicas are there at the same time."""


def main(dashboard_port: str) -> None:
    """Run until stdin ends."""
    import ray

    scratch = Path(tempfile.mkdtemp(prefix=sweeper.FOLDERS.format(pid=os.getpid()), dir="/tmp"))
    sweeper.watch(scratch)
    os.environ.update(SETTINGS | own_places(scratch) | of_endpoint(WarmrootConfig.of("smollm2", host="127.0.0.1")))
    os.environ[sweeper.MARK] = str(scratch)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with _loopback():
        ray.init(
            address="local",
            num_cpus=NUM_CPUS,
            include_dashboard=True,
            dashboard_host="127.0.0.1",
            dashboard_port=int(dashboard_port),
            namespace="warmroot",
            log_to_driver=False,
        )
    print("ready", flush=True)
    sys.stdin.read()
    ray.shutdown()
    sweeper.sweep(scratch)


if __name__ == "__main__":
    main(*sys.argv[1:])
