"""Sizes in bytes as people write and read them."""

import re
from typing import Any

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:([kmgtp])(i?))?b?\s*", re.IGNORECASE)


def parse_size(value: Any) -> Any:
    """Bytes of ``2GiB``, ``2Gi`` (2·2^30), ``2GB``, ``2G`` (2·10^9) or a plain number; the units are Kubernetes'.

    Values that are not texts pass unchanged, for a type check to judge. Raises ValueError.
    """
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value)
    if match is None:
        raise ValueError(f"{value!r} is not a size such as 2GiB, 512MB or 1000000")
    number, unit, binary = match.groups()
    power = " kmgtp".index(unit.lower()) if unit else 0
    return int(float(number) * (1024 if binary else 1000) ** power)


def format_size(num_bytes: float) -> str:
    """``1.25 GiB``: three significant digits in binary units."""
    sign, size = ("-", -num_bytes) if num_bytes < 0 else ("", num_bytes)
    unit = 0
    while size >= 1000 and unit < 5:
        size /= 1024
        unit += 1
    digits = 0 if unit == 0 or size >= 100 else 1 if size >= 10 else 2
    return f"{sign}{size:.{digits}f} {('B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB')[unit]}"
