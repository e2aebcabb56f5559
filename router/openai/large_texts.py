"""Prompts from texts and conversations, without holding others up: what takes long is done in threads.

The tokenizer lets other threads run; the event loop goes on while it works on a large text.
"""

import asyncio
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ...cluster.errors import ContextTooLongError
from ..frontend import Frontend
from .chat import ChatTemplateOptions

LARGE_CHARS = 2048
"""What takes some milliseconds; a thread costs a tenth of one."""
_THREADS = 2
Result = TypeVar("Result")


class LargeTexts:
    """Large texts wait for each other, and small ones for none of them."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="warmroot-large-text")

    async def tokenize(
        self, frontend: Frontend, prompts: Sequence[str | list[int]], *, add_special_tokens: bool, whole: bool = True
    ) -> list[list[int]]:
        """Token ids of each text; ids pass as they are.

        ``whole``: nothing will be cut off. Raises ContextTooLongError for a text that cannot fit then, however well it
        is tokenized.
        """
        sizes = [len(prompt) for prompt in prompts if isinstance(prompt, str)]

        def work() -> list[list[int]]:
            if whole:
                _check_length(max(sizes, default=0), frontend, "prompt")
            return [frontend.tokenize(prompt, add_special_tokens=add_special_tokens) for prompt in prompts]

        return await self._run(sum(sizes), work)

    async def render(self, frontend: Frontend, body: ChatTemplateOptions, *, whole: bool = True) -> list[int]:
        """Token ids of a conversation; ``whole`` as in ``tokenize``. Raises InvalidRequestError."""
        messages, options = body.messages_for_template(), body.render_options()
        size = sum([len(message.get("content", "")) for message in messages])
        if options["tools"]:
            size += len(json.dumps(options["tools"]))

        def work() -> list[int]:
            if whole:
                _check_length(size, frontend, "messages")
            return frontend.render(messages, **options)

        return await self._run(size, work)

    async def _run(self, num_chars: int, work: Callable[[], Result]) -> Result:
        if num_chars < LARGE_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _check_length(num_chars: int, frontend: Frontend, param: str) -> None:
    """Raises ContextTooLongError for what no tokens of this vocabulary could say in the model's context."""
    longest = frontend.tokenizer.longest_token
    if longest is None or num_chars <= frontend.max_model_len * longest:
        return
    limit = f"This model's maximum context length is {frontend.max_model_len} tokens. However, "
    least = num_chars // longest
    raise ContextTooLongError(
        f"{limit}your prompt has {num_chars} characters, which are more than {least} tokens. "
        "Please reduce the length of the prompt.",
        param=param,
    )
