"""What ``warmroot bench routing`` measures: clusters, the memory they have, and the requests that all of them get."""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from ...cluster.errors import ConfigError
from ...router.policy import POLICIES, RIVALS
from .peers.protocol import Job
from .workload import LengthRange, Workloads

OURS = "warm_prefix"
ONE = "one"
"""Among ``--systems``: one replica with the memory of all."""
BLOCK_SIZE = 16
_ONE_TREE = ("ray", "ray10")
"""Their tree is one for all routers; a router of ours keeps its own, so they are given a single ingress."""
_SUFFIX, _MESSAGE, _OUTPUT = LengthRange(16, 48), LengthRange(48, 144), LengthRange(16, 16)
_TURNS = 4
_RUNNING = 8
"""Requests at a time for which KV memory is added to that of the prefixes."""


@dataclass(frozen=True, slots=True)
class System:
    """A cluster to measure."""

    name: str
    num_replicas: int
    routing_policy: str
    num_ingress: int


def systems_of(options: Namespace) -> list[System]:
    """Those of ``--systems``, ours first. Raises ConfigError for an unknown name."""
    names = dict.fromkeys((OURS, *options.systems.split(",")))
    return [_system(name, options) for name in names]


def _system(name: str, options: Namespace) -> System:
    if name == ONE:
        return System("1 replica, all memory", 1, OURS, 1)
    if name not in POLICIES and name not in RIVALS:
        raise ConfigError(f"--systems: {name!r} is neither {ONE} nor a routing policy")
    title = f"{options.replicas} replicas, {name}"
    return System(title, options.replicas, name, 1 if name in _ONE_TREE else options.ingresses)


def jobs_of(workloads: Workloads, options: Namespace) -> list[Job]:
    """The requests of a round, in the order of their arrival."""
    mean = options.prefix_tokens
    prefix = LengthRange(mean - mean // 5, mean + mean // 5)
    if options.workload == "chat":
        return workloads.chats(options.prefixes, options.per_prefix, _TURNS, prefix, _MESSAGE, _OUTPUT)
    return workloads.many_prefixes(options.prefixes, options.per_prefix, prefix, _SUFFIX, _OUTPUT)


def num_blocks(system: System, options: Namespace) -> int:
    """Of each replica: ``--cache-share`` of all that is shared, and room for what runs; one alone has that of all."""
    shared = options.prefixes * options.prefix_tokens
    last = _SUFFIX
    if options.workload == "chat":
        last = _MESSAGE
        mean_turn = (_MESSAGE.low + _MESSAGE.high + _OUTPUT.low + _OUTPUT.high) // 2
        shared += options.prefixes * options.per_prefix * mean_turn
    running = _RUNNING * -(-(last.high + _OUTPUT.high) // BLOCK_SIZE)
    blocks = int(options.cache_share * shared / BLOCK_SIZE + running)
    return 1 + blocks * (options.replicas // system.num_replicas)


def shared_tokens(jobs: Sequence[Job]) -> float:
    """Share of prompt tokens that begin an earlier request as well: the most that a cache without bounds would hit."""
    seen: set[int] = set()
    total = shared = 0
    for job in jobs:
        keys = list(accumulate(job.prompt, lambda key, token: hash((key, token)), initial=0))[1:]
        total += len(keys)
        # The last token is computed in any case.
        shared += sum(key in seen for key in keys[:-1])
        seen.update(keys)
    return shared / total
