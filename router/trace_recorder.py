"""Records what was asked of a cluster, without a word of it: arrivals, lengths, and which prefixes were the same.

The file is what ``warmroot simulate`` reads: JSON lines in Mooncake's format, after one that tells the block size.
Block ids are hashes with a secret that is forgotten, so that nobody can look a known text up in them.
"""

import secrets
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from pathlib import Path

from ..cluster.messages import GenerateRequest, TokenDelta
from ..kv_store.hashing import chain, namespace_root
from .generator import TokenGenerator
from .json_lines import JsonLines

BLOCK_TOKENS = 16
_ID_BYTES = 6


class TraceRecorder:
    """A ``TokenGenerator`` that writes a line for each request that ended, and is otherwise the one inside it.

    What the disk does not take is lost; the requests are not. Several may append to one file. ``clock`` gives wall time
    in seconds, ``new_secret`` the secret of this recording.
    """

    def __init__(
        self,
        inner: TokenGenerator,
        path: Path,
        clock: Callable[[], float] = time.time,
        new_secret: Callable[[], str] = secrets.token_hex,
    ) -> None:
        self._inner = inner
        self._clock = clock
        self._secret = new_secret()
        self._rows = JsonLines(str(path), "recording")
        self._rows.add({"block_tokens": BLOCK_TOKENS})

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        """See ``TokenGenerator``."""
        arrived, first_at, cached, num_tokens = self._clock(), None, 0, 0
        async with aclosing(self._inner.generate(request)) as deltas:
            async for delta in deltas:
                if first_at is None:
                    first_at, cached = self._clock(), delta.cached_tokens or 0
                num_tokens += len(delta.token_ids)
                if delta.finish_reason is not None:
                    self._record(request, arrived, first_at, cached, num_tokens)
                yield delta

    def close(self) -> None:
        """Write what waits, and no more."""
        self._rows.close()

    def _record(self, request: GenerateRequest, arrived: float, first_at: float, cached: int, num_tokens: int) -> None:
        prompt = [*request.prompt_token_ids, *request.output_token_ids]
        root = namespace_root("recording", salt=self._secret + request.cache_salt)
        padded = prompt + [-1] * (-len(prompt) % BLOCK_TOKENS)
        ids = [int.from_bytes(block[:_ID_BYTES], "little") for block in chain(root, padded, BLOCK_TOKENS)]
        self._rows.add(
            {
                "timestamp": round(arrived * 1e3, 3),
                "input_length": len(prompt),
                "output_length": num_tokens,
                "hash_ids": ids,
                "ttft_ms": round((first_at - arrived) * 1e3, 3),
                "e2e_ms": round((self._clock() - arrived) * 1e3, 3),
                "cached_tokens": cached,
            }
        )
