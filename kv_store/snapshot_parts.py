"""Cuts a snapshot into batches that a router can use one by one: a small one with the hottest prefixes, then more."""

from collections.abc import Iterable, Iterator

from .events import BlocksStored, KvEvent

FIRST_PART_BLOCKS = 512
"""A router that starts reads this much of every replica first."""
MOST_PART_BLOCKS = 4096


def snapshot_parts(stored: Iterable[KvEvent]) -> Iterator[list[KvEvent]]:
    """Lists of events with at most that many blocks each, in order; runs are cut where they do not fit."""
    part: list[KvEvent] = []
    room = wanted = FIRST_PART_BLOCKS
    for event in stored:
        if not isinstance(event, BlocksStored):
            part.append(event)
            continue
        rest: BlocksStored | None = event
        while rest is not None:
            head, rest = _cut(rest, room)
            part.append(head)
            room -= len(head.hashes)
            if not room:
                yield part
                part, wanted = [], min(2 * wanted, MOST_PART_BLOCKS)
                room = wanted
    yield part


def _cut(event: BlocksStored, num_blocks: int) -> tuple[BlocksStored, BlocksStored | None]:
    if len(event.hashes) <= num_blocks:
        return event, None
    size = len(event.token_ids) // len(event.hashes) * num_blocks
    head, tail = event.hashes[:num_blocks], event.hashes[num_blocks:]
    return (
        BlocksStored(event.parent, head, event.token_ids[:size], event.tier),
        BlocksStored(head[-1], tail, event.token_ids[size:], event.tier),
    )
