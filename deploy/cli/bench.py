"""``warmroot bench engine|curves|overhead|routing|router|kv|weights|speculative|parallel|overload|autoscaling``."""

from collections.abc import Sequence
from importlib import import_module

from ...cluster.config_errors import did_you_mean
from ...cluster.errors import ConfigError

BENCHES = {
    "engine": "speed and quality of the engine beside the peers that are installed",
    "curves": "tokens/s against batch, context, chunk and threads, as a plot",
    "overhead": "what HTTP, router and channel cost over the engine alone",
    "routing": "cached tokens and time to first token under each routing policy",
    "router": "lookups, decisions, events and start of a router, beside the rivals that are installed",
    "kv": "KV formats: bytes, decode speed at long contexts, and quality",
    "weights": "forms of the weights: bytes, load time, speed and quality",
    "speculative": "every way to draft beside none, for one stream and for many",
    "parallel": "tensor, pipeline and expert parallel ranks beside one process with as many threads",
    "overload": "up to three times what the cluster can do: goodput, refusals, Retry-After, tenants",
    "autoscaling": "simulated days: SLO and replica-hours under our policy, Ray Serve's, and fixed numbers",
}


def main(argv: Sequence[str]) -> int:
    """Run one benchmark; its own flags follow its name."""
    if not argv or argv[0] in ("-h", "--help"):
        lines = [f"  {name:<13}{text}" for name, text in BENCHES.items()]
        print("\n".join(["usage: warmroot bench NAME [--json] [...]", "", *lines]))
        return 0
    name, *rest = argv
    if name not in BENCHES:
        raise ConfigError(f"{name!r} is not one of {', '.join(BENCHES)}{did_you_mean(name, BENCHES)}")
    return import_module(f"...bench.{name}", __name__).main(rest) or 0
