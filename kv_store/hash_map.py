"""A compact map from block hashes to small numbers: about 14 bytes an entry, where a dict needs 100.

Linear hashing (Litwin, VLDB 1980): one bucket is split for every few insertions, so the map grows without a pause.
A bucket is one ``bytes`` of records ``key (8) + number (4)``, searched by memmem. Keys must be uniform, as hashes are.
"""

from struct import Struct

KEY_BYTES = 8
_RECORD_BYTES = KEY_BYTES + 4
_RECORDS_PER_BUCKET = 24
_FIRST_BUCKETS = 64
_LOW_BITS = Struct("<I4x")
"""Of each key."""


class HashMap:
    """Maps keys of KEY_BYTES to numbers below 2**32. ``len`` counts the entries."""

    __slots__ = ("_buckets", "_round", "_size")

    def __init__(self) -> None:
        self._buckets: list[bytes] = [b""] * _FIRST_BUCKETS
        self._round = _FIRST_BUCKETS  # buckets when this round of splits began; a power of two
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def get(self, key: bytes) -> int | None:
        """The key's number, or None."""
        bucket = self._buckets[self._index(key)]
        at = _find(bucket, key)
        return None if at < 0 else int.from_bytes(bucket[at + KEY_BYTES : at + _RECORD_BYTES], "little")

    def put(self, keys: bytes, number: int, *, overwrite: bool = True) -> int:
        """Insert: every KEY_BYTES of ``keys`` leads to ``number``.

        Returns how many do: without ``overwrite`` it stops at the first that is known.
        """
        tail, at = number.to_bytes(4, "little"), 0
        buckets, first_round = self._buckets, self._round
        num_buckets, bits = len(buckets), 2 * first_round - 1
        for (low,) in _LOW_BITS.iter_unpack(keys):
            # ``_index`` written out: this loop is most of what an index does with events.
            index: int = low & bits
            if index >= num_buckets:
                index -= first_round
            key = keys[at : at + KEY_BYTES]
            bucket = buckets[index]
            found = _find(bucket, key) if key in bucket else -1
            if found >= 0 and not overwrite:
                break
            at += KEY_BYTES
            if found >= 0:
                buckets[index] = bucket[:found] + key + tail + bucket[found + _RECORD_BYTES :]
                continue
            buckets[index] = bucket + (key + tail)
            self._size += 1
            if self._size > num_buckets * _RECORDS_PER_BUCKET:
                self._split_next()
                first_round = self._round
                num_buckets, bits = len(buckets), 2 * first_round - 1
        return at // KEY_BYTES

    def pop(self, key: bytes) -> None:
        """Remove the key if it is there."""
        index = self._index(key)
        bucket = self._buckets[index]
        at = _find(bucket, key)
        if at >= 0:
            self._buckets[index] = bucket[:at] + bucket[at + _RECORD_BYTES :]
            self._size -= 1

    def _index(self, key: bytes) -> int:
        index = int.from_bytes(key[:4], "little") & (2 * self._round - 1)
        return index if index < len(self._buckets) else index - self._round

    def _split_next(self) -> None:
        old = len(self._buckets) - self._round
        records = self._buckets[old]
        byte, bit = divmod(self._round.bit_length() - 1, 8)
        stay: list[bytes] = []
        move: list[bytes] = []
        for at in range(0, len(records), _RECORD_BYTES):
            (move if records[at + byte] >> bit & 1 else stay).append(records[at : at + _RECORD_BYTES])
        self._buckets[old] = b"".join(stay)
        self._buckets.append(b"".join(move))
        if len(self._buckets) == 2 * self._round:
            self._round *= 2


def _find(bucket: bytes, key: bytes) -> int:
    at = bucket.find(key)
    while at > 0 and at % _RECORD_BYTES:
        at = bucket.find(key, at + 1)
    return at
