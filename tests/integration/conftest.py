"""One cluster for all integration tests: two replicas of SmolLM2, small enough that they run out of room."""

from collections.abc import Iterator

import httpx
import pytest
import ray

import warmroot
from warmroot.deploy.local_ray import free_port

from .cluster_harness import Cluster, descendants, processes, wait_until

KEYS = {
    "num_replicas": 2,
    "threads_per_replica": 1,
    # A single sequence may need 64.
    "num_kv_blocks": 80,
    "max_num_seqs": 32,
    "max_model_len": 1024,
    "max_body_bytes": 256 * 1024,
    "shutdown_grace": 2.0,
    # However slow the machine is: what is tested here is never refused.
    "max_queue_wait": 3600.0,
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What needs the cluster comes after what does not, and what breaks it comes last."""
    items.sort(key=lambda item: (item.get_closest_marker("cluster") is not None, item.path.stem == "test_failures"))


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    port = free_port()
    before = processes()
    handle = warmroot.run("smollm2", port=port, **KEYS)
    try:
        running = Cluster(handle, f"http://127.0.0.1:{port}", ray.get_runtime_context().gcs_address)
        wait_until(lambda: len(running.replicas()) == 2)
        yield running
    finally:
        started = descendants() - before
        handle.close()
        warmroot.shutdown()
        # What is orphaned is in the first set, what is started even now in the second.
        wait_until(lambda: not ((started & processes()) | descendants()) - before, explain=descendants)


@pytest.fixture(scope="session")
def client(cluster: Cluster) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=cluster.url, timeout=120, trust_env=False) as client:
        yield client
