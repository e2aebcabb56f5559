"""Log-probabilities as the two OpenAI APIs and vLLM write them."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from ...cluster.messages import TokenLogprob
from ..tokenizer import Tokenizer

LOWEST_LOGPROB = -9999.0
"""JSON knows no infinity; OpenAI writes this for tokens of probability 0."""


class LogprobFormat:
    """Writes tokens as text, or as ``token_id:123`` where the request asks for it."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def chat(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        """``choices[].logprobs`` of a chat completion."""
        content = [
            {
                **self._chat_token(entry.token_id, entry.logprob),
                "top_logprobs": [self._chat_token(*alternative) for alternative in entry.top],
            }
            for entry in logprobs
        ]
        return {"content": content, "refusal": None}

    def completion(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob | None], offset: int
    ) -> dict[str, Any]:
        """``choices[].logprobs`` of a text completion whose text begins at character ``offset``.

        The first token of an echoed prompt has no log-probability.
        """
        tokens = [self.text(token_id) for token_id in token_ids]
        return {
            "text_offset": list(accumulate(map(len, tokens[:-1]), initial=offset)) if tokens else [],
            "token_logprobs": [None if entry is None else _finite(entry.logprob) for entry in logprobs],
            "tokens": tokens,
            "top_logprobs": [None if entry is None else self._top(entry) for entry in logprobs],
        }

    def prompt(self, logprobs: Sequence[TokenLogprob | None]) -> list[dict[str, Any] | None]:
        """``prompt_logprobs`` as vLLM writes them: per position, token id to logprob, rank and text."""
        return [None if entry is None else self._prompt_token(entry) for entry in logprobs]

    def text(self, token_id: int) -> str:
        """The token as text; bytes that are no whole character become U+FFFD."""
        return f"token_id:{token_id}" if self._as_ids else self._tokenizer.token_text(token_id)

    def _chat_token(self, token_id: int, logprob: float) -> dict[str, Any]:
        encoded = list(self._tokenizer.token_bytes(token_id))
        return {"token": self.text(token_id), "logprob": _finite(logprob), "bytes": encoded}

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        top: dict[str, float] = {}
        for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
            top.setdefault(self.text(token_id), _finite(logprob))  # of tokens that look alike, the likelier
        return top

    def _prompt_token(self, entry: TokenLogprob) -> dict[str, Any]:
        ranked = [(entry.token_id, entry.logprob, entry.rank)]
        ranked += [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(entry.top, start=1)]
        return {
            str(token_id): {"logprob": _finite(logprob), "rank": rank, "decoded_token": self.text(token_id)}
            for token_id, logprob, rank in ranked
        }


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
