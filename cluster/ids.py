"""Identifiers, as distinct types so that the type checker keeps them apart."""

from typing import NewType

RequestId = NewType("RequestId", str)
"""One sequence in an engine. A request with ``n=3`` is three of these: ``abc``, ``abc/1``, ``abc/2``."""

ReplicaId = NewType("ReplicaId", str)
"""Name of a replica, stable over its restarts; an incarnation is (ReplicaId, Epoch)."""

Epoch = NewType("Epoch", int)
"""Incarnation of a replica, increasing (nanoseconds of its start): words of the dead are ignored."""

BlockId = NewType("BlockId", int)
"""Index of a page in a replica's KV memory. Page 0 is never handed out: it stands for "no block"."""

BlockHash = NewType("BlockHash", bytes)
"""16 bytes: identity of a token block and of everything before it (see ``kv_store.hashing``)."""

NULL_BLOCK = BlockId(0)
