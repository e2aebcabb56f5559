"""API keys in memory: by digest, so that the key itself is known to nobody but its holder."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256

from .principal import Principal

HASH_PREFIX = "sha256:"


@dataclass(frozen=True, slots=True)
class HeldKey:
    """Whose a key is. ``expires`` is the wall clock, in seconds, from which it opens nothing; None: never."""

    principal: Principal
    expires: float | None = None


class KeyRing:
    """All keys that may open something, by ``digest_of``."""

    def __init__(self, keys: Mapping[bytes, HeldKey]) -> None:
        self._keys = dict(keys)

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, key: str, now: float) -> Principal | None:
        """Whose ``key`` is; None for a wrong or expired one. ``now`` is the wall clock, in seconds.

        The time it takes tells nothing of the keys that there are: the whole of ``key`` is hashed before anything is
        compared, and who cannot invert SHA-256 cannot choose how much of a digest agrees.
        """
        held = self._keys.get(digest_of(key))
        if held is None or (held.expires is not None and now >= held.expires):
            return None
        return held.principal

    def principals(self) -> Iterable[Principal]:
        """Of every key."""
        return (held.principal for held in self._keys.values())

    def joined(self, other: "KeyRing") -> "KeyRing":
        """The keys of both; where both have a key, this one's holder counts."""
        return KeyRing({**other._keys, **self._keys})


def digest_of(key: str) -> bytes:
    """SHA-256. Keys are long and random: a slow or salted hash would add work to requests and nothing to safety."""
    return sha256(key.encode("utf-8", "surrogatepass")).digest()


def hash_text(key: str) -> str:
    """How the digest of ``key`` is written in files: ``sha256:`` and 64 hexadecimal digits."""
    return HASH_PREFIX + digest_of(key).hex()
