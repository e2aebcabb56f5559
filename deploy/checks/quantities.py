"""Kubernetes's way to write amounts."""

import re

_QUANTITY = re.compile(r"([0-9.]+)([munkMGTPE]i?)?")
_POWERS = {unit: power for power, unit in enumerate("kMGTPE", start=1)}


def number(quantity: str | float) -> float:
    """``quantity`` as a number: ``500m`` is 0.5, ``2Gi`` is 2**31. Raises ValueError."""
    match = _QUANTITY.fullmatch(str(quantity))
    if match is None:
        raise ValueError(f"{quantity!r} is no quantity of Kubernetes")
    unit = match[2] or ""
    if unit in ("m", "u", "n"):
        return float(match[1]) / 1000 ** ("mun".index(unit) + 1)
    base = 1024 if unit.endswith("i") else 1000
    return float(match[1]) * base ** (_POWERS[unit[0]] if unit else 0)
