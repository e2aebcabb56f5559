"""All that can be wrong with the objects of a release."""

from collections.abc import Sequence

from . import custom_resources, network, pods, prometheus, ray_cluster, references, security, serve_config
from .tools import Manifest, Tools


def problems_of(tools: Tools, made: Sequence[Manifest]) -> list[str]:
    """All that is wrong with manifests."""
    return [
        *custom_resources.problems(made),
        *ray_cluster.problems(made),
        *serve_config.problems(made),
        *references.problems(made),
        *network.problems(made),
        *security.problems(made),
        *prometheus.problems_in(tools, made),
        *(problem for version in pods.VERSIONS for problem in pods.problems(tools, made, version)),
    ]
