"""The load of ``bench router``: conversations that replicas hold, as the event batches they send, and new prompts.

A conversation is a system prompt, shared with others, and turns of a prompt and an answer. Prompts are events of many
blocks, answers of one block each; a batch has what happened on a replica in one gathering period.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from ...cluster.ids import BlockHash, Epoch, ReplicaId
from ...cluster.messages import ReplicaInfo
from ...kv_store.events import BlocksStored, KvEvent, KvEventBatch, SnapshotPart, encode
from ...kv_store.hashing import TOKEN_BYTES, block_hash, namespace_root
from ...kv_store.snapshot_parts import snapshot_parts

BLOCK_SIZE = 16
_BLOCK_BYTES = BLOCK_SIZE * TOKEN_BYTES
_VOCABULARY = 128_000
_SYSTEM_BLOCKS, _NUM_SYSTEMS = 32, 32
_TURNS, _ASKED_BLOCKS, _ANSWERED_BLOCKS = 4, 62, 8
_TURNS_PER_BATCH = 4
PROMPT_TOKENS = 5000
_SKEW = 1.1
"""Zipf's exponent of how often conversations go on."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """What one replica holds of it, hottest conversations first in a ``FleetLoad``."""

    replica: int
    system: int
    tokens: bytes
    """Packed, whole blocks."""


class FleetLoad:
    """Conversations of ``num_blocks`` distinct blocks over ``num_replicas``."""

    def __init__(self, num_blocks: int, num_replicas: int, seed: int) -> None:
        self.root = namespace_root("bench")
        self._rng = np.random.default_rng(seed)
        self.names = [ReplicaId(f"replica-{number}") for number in range(num_replicas)]
        self._systems = [self._tokens(_SYSTEM_BLOCKS * BLOCK_SIZE) for _ in range(_NUM_SYSTEMS)]
        own = _TURNS * (_ASKED_BLOCKS + _ANSWERED_BLOCKS)
        count = max(2, (num_blocks - _NUM_SYSTEMS * _SYSTEM_BLOCKS) // own)
        self.conversations = [self._conversation(number, own * BLOCK_SIZE) for number in range(count)]
        weights = 1.0 / np.arange(1, count + 1) ** _SKEW
        self._popularity = weights / weights.sum()

    def batches(self) -> Iterator[bytes]:
        """What all replicas told, encoded. Every replica's turns come one by one, as they would."""
        sequence = [0] * len(self.names)
        by_replica: list[list[KvEvent]] = [[] for _ in self.names]
        waiting = [0] * len(self.names)
        stored: set[tuple[int, int]] = set()
        for conversation in self.conversations:
            replica = conversation.replica
            known = (replica, conversation.system) in stored
            stored.add((replica, conversation.system))
            for turn in self._turns(conversation, skip=_SYSTEM_BLOCKS if known else 0):
                by_replica[replica] += turn
                waiting[replica] += 1
                if waiting[replica] == _TURNS_PER_BATCH:
                    yield self._encoded(replica, sequence[replica], by_replica[replica])
                    sequence[replica] += 1
                    by_replica[replica], waiting[replica] = [], 0
        for replica, events in enumerate(by_replica):
            if events:
                yield self._encoded(replica, sequence[replica], events)

    def snapshots(self) -> Iterator[tuple[ReplicaId, list[bytes]]]:
        """Each replica's snapshot, the hottest first, as its publisher makes it."""
        ordered = sorted(self.conversations, key=lambda conversation: conversation.replica)
        for replica, held in groupby(ordered, key=lambda conversation: conversation.replica):
            events = [BlocksStored(self.root, tuple(self._hashes(one.tokens)), one.tokens) for one in held]
            parts = [(SnapshotPart(number), *part) for number, part in enumerate(snapshot_parts(events))]
            yield (
                self.names[replica],
                [self._encoded(replica, number, part, compress=True) for number, part in enumerate(parts)],
            )

    def prompts(self, count: int) -> list[bytes]:
        """Packed prompts of PROMPT_TOKENS: half go on with a conversation, a quarter share only a system prompt."""
        chosen = self._rng.choice(len(self.conversations), size=count, p=self._popularity)
        made: list[bytes] = []
        for number, place in enumerate(chosen):
            conversation = self.conversations[int(place)]
            if number % 2:
                known = conversation.tokens[: (PROMPT_TOKENS - 400) * TOKEN_BYTES]
            else:
                known = self._systems[conversation.system] if number % 4 else b""
            made.append(known + self._tokens(PROMPT_TOKENS - len(known) // TOKEN_BYTES))
        return made

    def infos(self) -> list[ReplicaInfo]:
        """What the replicas announce."""
        blocks = 2 * len(self.conversations) * _TURNS * (_ASKED_BLOCKS + _ANSWERED_BLOCKS) // len(self.names)
        return [
            ReplicaInfo(
                replica=name,
                epoch=Epoch(1),
                model="bench",
                address=f"{name}:1",
                kv_namespace=self.root,
                block_size=BLOCK_SIZE,
                kv_total_blocks=max(blocks, 4096),
                max_num_seqs=256,
                max_num_batched_tokens=8192,
                max_model_len=131_072,
                prefill_tokens_per_s=20_000.0 + 100.0 * (number % 7),
                decode_step_s=0.02,
            )
            for number, name in enumerate(self.names)
        ]

    def _conversation(self, number: int, own_tokens: int) -> Conversation:
        system = int(self._rng.integers(_NUM_SYSTEMS))
        tokens = self._systems[system] + self._tokens(own_tokens)
        return Conversation(number % len(self.names), system, tokens)

    def _turns(self, conversation: Conversation, skip: int) -> Iterator[list[KvEvent]]:
        """The events of each turn; the first ``skip`` blocks are cached already."""
        hashes = [self.root, *self._hashes(conversation.tokens)]
        at = skip
        for turn in range(_TURNS):
            answer = _SYSTEM_BLOCKS + turn * (_ASKED_BLOCKS + _ANSWERED_BLOCKS) + _ASKED_BLOCKS
            runs = [(at, answer), *((block, block + 1) for block in range(answer, answer + _ANSWERED_BLOCKS))]
            at = answer + _ANSWERED_BLOCKS
            yield [
                BlocksStored(
                    hashes[begin],
                    tuple(hashes[begin + 1 : end + 1]),
                    conversation.tokens[begin * _BLOCK_BYTES : end * _BLOCK_BYTES],
                )
                for begin, end in runs
            ]

    def _hashes(self, tokens: bytes) -> list[BlockHash]:
        hashes: list[BlockHash] = []
        parent = self.root
        for at in range(0, len(tokens), _BLOCK_BYTES):
            parent = block_hash(parent, tokens[at : at + _BLOCK_BYTES])
            hashes.append(parent)
        return hashes

    def _encoded(self, replica: int, sequence: int, events: Sequence[KvEvent], *, compress: bool = False) -> bytes:
        return encode(KvEventBatch(self.names[replica], Epoch(1), sequence, tuple(events)), compress=compress)

    def _tokens(self, count: int) -> bytes:
        return self._rng.integers(0, _VOCABULARY, count, dtype="<i4").tobytes()
