"""What a step of a simulated replica costs."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ...cluster.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaCosts:
    """A step takes ``prefill_s(new tokens)`` plus ``decode_s(...)``. The defaults are Dynamo's mocker, which fits vLLM
    on a GPU: milliseconds there, seconds here.
    """

    prefill_fixed_s: float = 16.50142e-3
    prefill_token_s: float = 1.518344e-5
    prefill_square_s: float = 4.209989e-10
    prefill_context_s: float = 0.0
    """For each new token and token of its own sequence that was computed before the step: nothing in the mocker."""
    decode_fixed_s: float = 5.74e-3
    decode_usage_s: float = 54.01e-3
    """Grows with the tokens that decoding sequences read, as a share of KV memory: a prefix counts for each of them."""
    decode_usage_square_s: float = -25.74e-3
    decode_sequence_s: float = 0.0
    """For each sequence that decodes: nothing in the mocker."""
    kv_tokens: int = 1_048_576
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_prefill_chunk: int | None = None
    """Prompt tokens in a step in which others decode; None: as many as fit."""

    def prefill_s(self, tokens: int) -> float:
        """Seconds that ``tokens`` new tokens add to a step."""
        if not tokens:
            return 0.0
        return self.prefill_fixed_s + (self.prefill_token_s + self.prefill_square_s * tokens) * tokens

    def prompt_s(self, tokens: int) -> float:
        """Seconds to compute a prompt alone, in chunks."""
        chunk = self.max_num_batched_tokens
        whole, rest = divmod(tokens, chunk)
        pairs = chunk * chunk * whole * (whole - 1) // 2 + rest * whole * chunk
        return whole * self.prefill_s(chunk) + self.prefill_s(rest) + self.prefill_context_s * pairs

    def decodes_s(self, steps: int, sequences: int, usage: float, growth: float) -> float:
        """Seconds of so many steps that only decode; usage grows by ``growth`` with each of them."""
        linear = steps * (steps - 1) / 2
        squares = linear * (2 * steps - 1) / 3
        sum_usage = steps * usage + growth * linear
        sum_square = steps * usage * usage + 2 * usage * growth * linear + growth * growth * squares
        fixed = self.decode_fixed_s + self.decode_sequence_s * sequences
        return steps * fixed + self.decode_usage_s * sum_usage + self.decode_usage_square_s * sum_square

    @property
    def prefill_tokens_per_s(self) -> float:
        """What a replica measures at its start, on a prompt of 1,024 tokens."""
        return 1024 / self.prefill_s(1024)

    def slowed(self, factor: float) -> "ReplicaCosts":
        """A replica that takes so many times as long for everything."""
        times = {name: value * factor for name, value in asdict(self).items() if name.endswith("_s")}
        return replace(self, **times)

    def with_memory(self, kv_tokens: int) -> "ReplicaCosts":
        """A replica with that KV memory."""
        return replace(self, kv_tokens=kv_tokens)

    def to_json(self) -> str:
        """For ``--costs``."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def read(cls, path: Path) -> "ReplicaCosts":
        """Raises ConfigError."""
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"costs: {path}: {error}", param="costs") from error
