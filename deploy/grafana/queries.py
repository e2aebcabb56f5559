"""PromQL that stands in many panels and alerts, and takes care of who exports what.

What an ingress counts is summed over ingresses. What replicas say of themselves every ingress repeats: it is reduced
to one value a replica first, or a second ingress would double it.
"""

SELECTED = '{model_name=~"$model"}'
INTERVAL = "[$__rate_interval]"
TTFT, ITL = "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds"
TTFT_SLO, ITL_SLO = "2.5", "0.1"
"""Seconds that are within the SLO: bounds of buckets, as Prometheus writes them."""


def counted(metric: str, by: str = "", where: str = "") -> str:
    """Events in a second of what ingresses count, over all of them; ``where`` selects in place of the model."""
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (rate({metric}{where}{INTERVAL}))"


def seen(metric: str, by: str = "", where: str = "") -> str:
    """The largest of what ingresses see of the same thing."""
    grouped = f" by ({by})" if by else ""
    return f"max{grouped} ({metric}{where})"


def of_replica(metric: str, where: str = SELECTED) -> str:
    """A gauge of each replica."""
    return f"max by (model_name, engine) ({metric}{where})"


def rate_of_replica(metric: str, where: str = SELECTED) -> str:
    """Events in a second of each replica's own counter."""
    return f"max by (model_name, engine) (rate({metric}{where}{INTERVAL}))"


def quantile(share: float, histogram: str, where: str = SELECTED, by: str = "") -> str:
    """Of a histogram that ingresses count."""
    grouped = f"le, {by}" if by else "le"
    return f"histogram_quantile({share:g}, sum by ({grouped}) (rate({histogram}_bucket{where}{INTERVAL})))"


def quantiles(histogram: str, where: str = SELECTED) -> tuple[tuple[str, str], ...]:
    """The median, and what nineteen and ninety-nine in twenty and in a hundred keep below."""
    return tuple((f"p{share * 100:g}", quantile(share, histogram, where)) for share in (0.5, 0.95, 0.99))


def ratio(part: str, whole: str) -> str:
    """Nothing where the whole is nothing."""
    return f"{part} / ({whole} > 0)"


def share(part: str, whole: str = "vllm:prompt_tokens_total") -> str:
    """Of one counter in another, over all ingresses."""
    return ratio(counted(part), counted(whole))


def within(histogram: str, bound: str) -> str:
    """Share of values up to a bucket's ``bound``."""
    good = f'{histogram}_bucket{{model_name=~"$model",le="{bound}"}}'
    return ratio(counted(good), counted(f"{histogram}_count", where=SELECTED))
