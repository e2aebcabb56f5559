"""A compact map from block hashes to small numbers: about 14 bytes an entry, where a dict needs 100.

Linear hashing (Litwin, VLDB 1980): one bucket is split for every few insertions, so the map grows without a pause.
A bucket is one ``bytes`` of records ``key (8) + number (4)``, searched by memmem. Keys must be uniform, as hashes are.
"""

KEY_BYTES = 8
_RECORD_BYTES = KEY_BYTES + 4
_RECORDS_PER_BUCKET = 24
_FIRST_BUCKETS = 64


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

    def put(self, key: bytes, number: int) -> None:
        """Insert or overwrite."""
        index = self._index(key)
        bucket = self._buckets[index]
        record = key + number.to_bytes(4, "little")
        at = _find(bucket, key)
        if at >= 0:
            self._buckets[index] = bucket[:at] + record + bucket[at + _RECORD_BYTES :]
            return
        self._buckets[index] = bucket + record
        self._size += 1
        if self._size > len(self._buckets) * _RECORDS_PER_BUCKET:
            self._split_next()

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
        self._buckets[old] = b""
        self._buckets.append(b"")
        for at in range(0, len(records), _RECORD_BYTES):
            self._buckets[self._index(records[at : at + KEY_BYTES])] += records[at : at + _RECORD_BYTES]
        if len(self._buckets) == 2 * self._round:
            self._round *= 2


def _find(bucket: bytes, key: bytes) -> int:
    at = bucket.find(key)
    while at > 0 and at % _RECORD_BYTES:
        at = bucket.find(key, at + 1)
    return at
