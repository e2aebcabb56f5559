"""Block hashes: blake2b-128 over everything that decides what a block's KV holds.

The same on every machine and in every process: fields are length-prefixed UTF-8, tokens little-endian int32.
"""

import struct
import sys
from array import array
from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b

from ..cluster.ids import BlockHash

HASH_BYTES = 16
TOKEN_BYTES = 4


def namespace_root(
    model: str, weights_version: str = "", adapter: str = "", kv_format: str = "", salt: str = ""
) -> BlockHash:
    """Parent of the first blocks of every chain: KV is shared only where all of these are equal.

    Equal to ``salted(namespace_root(...without salt...), salt)``: who knows the plain root can add a tenant's salt.
    """
    digest = blake2b(digest_size=HASH_BYTES, person=b"warmroot root")
    for field in (model, weights_version, adapter, kv_format):
        data = field.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return salted(BlockHash(digest.digest()), salt)


def salted(root: BlockHash, salt: str) -> BlockHash:
    """The root of one tenant inside ``root``; without a salt it is ``root`` itself."""
    if not salt:
        return root
    return BlockHash(blake2b(salt.encode(), digest_size=HASH_BYTES, key=root, person=b"warmroot salt").digest())


def block_hash(parent: BlockHash, token_bytes: bytes) -> BlockHash:
    """Identity of a block with those tokens (``pack_tokens``) after ``parent``."""
    return BlockHash(blake2b(parent + token_bytes, digest_size=HASH_BYTES).digest())


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian int32. Raises OverflowError for an id that does not fit, TypeError for no id."""
    if not isinstance(token_ids, array):
        with suppress(struct.error):  # the array says better what is wrong, but takes twice as long
            return struct.pack(f"<{len(token_ids)}i", *token_ids)
    packed = array("i", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(packed: bytes) -> list[int]:
    """Inverse of ``pack_tokens``. Raises ValueError where the bytes are not whole tokens."""
    tokens = array("i")
    tokens.frombytes(packed)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens.tolist()


def chain(root: BlockHash, token_ids: Sequence[int], block_size: int) -> list[BlockHash]:
    """Hashes of the whole blocks of ``token_ids``; a last block that is not full has none."""
    packed, step = pack_tokens(token_ids), TOKEN_BYTES * block_size
    hashes: list[BlockHash] = []
    parent = root
    for start in range(0, len(packed) - step + 1, step):
        parent = block_hash(parent, packed[start : start + step])
        hashes.append(parent)
    return hashes
