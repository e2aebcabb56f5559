"""All that can be wrong with the objects of a release."""

from collections.abc import Sequence

from . import custom_resources, pods, ray_cluster, serve_config
from .tools import Manifest, Tools


def problems_of(tools: Tools, made: Sequence[Manifest]) -> list[str]:
    """All that is wrong with manifests."""
    return [
        *custom_resources.problems(made),
        *ray_cluster.problems(made),
        *serve_config.problems(made),
        *(problem for version in pods.VERSIONS for problem in pods.problems(tools, made, version)),
    ]
