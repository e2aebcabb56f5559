"""Turns valid inputs into nearly valid ones: bytes, and trees of values as JSON and msgpack hold them. Seeded."""

from collections.abc import Callable
from random import Random
from typing import Any

DEEP = 60
"""Levels of nesting that a mutation adds; ``nested`` adds more."""
LENGTHS = (0, 1, 2**7, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**60, 2**63 - 1, 2**63, 2**64 - 1)


def nested(levels: int) -> list[Any]:
    """A list in a list in a list …"""
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


SCALARS: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 255, 256, *LENGTHS, -(2**31), -(2**63), 10**30, 0.0, -0.0, 0.5, -1.5, 1e-45,
    1e308, float("inf"), float("-inf"), float("nan"), "", "a", "0", "-1", "1e400", "true", "\x00", "\U0001f600",
    "x" * 300, "../../etc/passwd", "{{ x }}", b"", b"\x00", b"\xff" * 16, b"\x80abc",
)  # fmt: skip


def odd_value(rng: Random) -> Any:
    """A value that is seldom what a reader expects."""
    pick = rng.randrange(10)
    if pick == 0:
        return rng.choice(([], {}, [[]], [None] * 3, {"": None}, {"a": {}}, [{}], ["a", 1]))
    return nested(DEEP) if pick == 1 else rng.choice(SCALARS)


def mutate_tree(rng: Random, value: Any, times: int = 1) -> Any:
    """``value`` with some of its nodes replaced, dropped, doubled or swapped; the original stays as it is."""
    for _ in range(times):
        value = _at_random_node(rng, value, lambda node: _changed(rng, node))
    return value


def _at_random_node(rng: Random, value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        return {**value, key: _at_random_node(rng, value[key], change)}
    if isinstance(value, list | tuple) and value and rng.random() < 0.85:
        at = rng.randrange(len(value))
        return [*value[:at], _at_random_node(rng, value[at], change), *value[at + 1 :]]
    return change(value)


def _changed(rng: Random, node: Any) -> Any:
    if rng.random() < 0.4:
        return odd_value(rng)
    match node:
        case dict():
            return _changed_mapping(rng, node)
        case list() | tuple():
            return _changed_list(rng, list(node))
        case bool() | None:
            return odd_value(rng)
        case int() | float():
            return rng.choice((node + 1, node - 1, -node, node * 2, float(node), str(node), [node]))
        case str():
            return rng.choice((node.upper(), node[:-1], node * 2, node + "\x00", [node], node.encode()))
        case bytes():
            return mutate_bytes(rng, node)
        case _:
            return odd_value(rng)


def _changed_mapping(rng: Random, node: dict[Any, Any]) -> dict[Any, Any]:
    keys = list(node)
    if keys and rng.random() < 0.6:
        dropped = rng.choice(keys)
        return {key: value for key, value in node.items() if key != dropped}
    name = rng.choice((*keys, "unknown", "", 7)) if keys else "unknown"
    return {**node, name: odd_value(rng)}


def _changed_list(rng: Random, node: list[Any]) -> list[Any]:
    pick = rng.randrange(5)
    if pick == 0 and node:
        del node[rng.randrange(len(node))]
    elif pick == 1:
        node.insert(rng.randrange(len(node) + 1), odd_value(rng))
    elif pick == 2:
        node = node * rng.choice((2, 3, 20))
    elif pick == 3:
        rng.shuffle(node)
    else:
        node = node[: len(node) // 2]
    return node


def mutate_bytes(rng: Random, data: bytes, times: int = 1) -> bytes:
    """``data`` with bits flipped, numbers overwritten, parts cut, doubled or moved."""
    for _ in range(times):
        data = _changed_bytes(rng, data)
    return data


def _changed_bytes(rng: Random, data: bytes) -> bytes:
    at, to = sorted((rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)))
    match rng.randrange(7):
        case 0:
            return data[:at] + data[to:]
        case 1:
            return data[:to] + data[at:to] + data[to:]
        case 2:
            return data[:at]
        case 3:
            size = rng.choice((1, 2, 4, 8))
            number = rng.choice(LENGTHS) % 2 ** (8 * size)
            return data[:at] + number.to_bytes(size, rng.choice(("little", "big"))) + data[at + size :]
        case 4:
            return data[:at] + rng.randbytes(rng.randrange(1, 9)) + data[at:]
        case 5:
            return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
        case _:
            return data[:at] + bytes(byte ^ 1 << rng.randrange(8) for byte in data[at : at + 1]) + data[at + 1 :]
