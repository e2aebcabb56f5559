"""Label selectors, as Kubernetes reads them."""

from collections.abc import Mapping
from typing import Any

from .tools import Manifest


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a selector of ``matchLabels`` and ``matchExpressions`` takes an object; an empty one takes all."""
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        _holds(expression, labels) for expression in selector.get("matchExpressions", [])
    )


def selected(selector: Mapping[str, Any], pods: Mapping[str, Manifest]) -> dict[str, Manifest]:
    """The pods that a selector takes, of those by name."""
    return {name: pod for name, pod in pods.items() if selects(selector, labels_of(pod))}


def labels_of(pod: Manifest) -> Mapping[str, str]:
    """Of an object."""
    return pod.get("metadata", {}).get("labels", {})


def _holds(expression: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    key, values = expression["key"], expression.get("values", [])
    match expression["operator"]:
        case "In":
            return labels.get(key) in values
        case "NotIn":
            return labels.get(key) not in values
        case "Exists":
            return key in labels
        case _:
            return key not in labels
