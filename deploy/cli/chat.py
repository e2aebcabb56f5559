"""``warmroot chat``: a conversation in the terminal."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

from .endpoint import Endpoint, add_endpoint_flags, add_sampling_flags, sampling_fields
from .flags import Parser

Message = dict[str, str]


def main(argv: Sequence[str]) -> int:
    """One answer with ``--message``, else a conversation."""
    parser = Parser("warmroot chat", "Chat with a running endpoint. /clear starts anew, /exit or Ctrl-D leaves.")
    parser.add_argument("--message", metavar="TEXT", help="ask this, print the answer and exit")
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    add_endpoint_flags(parser)
    add_sampling_flags(parser)
    arguments = parser.read(argv)
    endpoint = Endpoint(arguments.url, arguments.api_key)
    body = {"model": arguments.model or endpoint.model(), **sampling_fields(arguments)}
    chat = Chat(endpoint, body, arguments.system)
    if arguments.message is not None:
        chat.ask(arguments.message)
        return 0
    return _converse(chat)


class Chat:
    """A conversation and its history."""

    def __init__(self, endpoint: Endpoint, body: dict[str, Any], system: str | None) -> None:
        self.endpoint = endpoint
        self.body = body
        self._start: list[Message] = [{"role": "system", "content": system}] if system else []
        self.messages = list(self._start)

    def clear(self) -> None:
        """Forget all but the system prompt."""
        self.messages = list(self._start)

    def ask(self, text: str) -> dict[str, Any]:
        """Print the answer as it comes and keep it; returns the usage. An answer that fails is not kept."""
        question = {"role": "user", "content": text}
        body = self.body | {"messages": [*self.messages, question]}
        answer: list[str] = []
        usage: dict[str, Any] = {}
        with closing(self.endpoint.stream("/v1/chat/completions", body)) as chunks:
            for chunk in chunks:
                usage = chunk.get("usage") or usage
                for choice in chunk["choices"]:
                    answer.append(choice["delta"].get("content") or "")
                    print(answer[-1], end="", flush=True)
        print()
        self.messages += [question, {"role": "assistant", "content": "".join(answer)}]
        return usage


def _converse(chat: Chat) -> int:
    interactive = sys.stdin.isatty()
    if interactive:
        print(f"Chatting with {chat.body['model']} at {chat.endpoint.url}. /clear starts anew, /exit leaves.")
    for text in _questions(interactive):
        if text == "/exit":
            break
        if text == "/clear":
            chat.clear()
            continue
        try:
            usage = chat.ask(text)
        except KeyboardInterrupt:
            if not interactive:
                raise
            print("\n(stopped)")
            continue
        if interactive:
            print(f"\033[2m{_note(usage)}\033[0m")
    return 0


def _questions(interactive: bool) -> Iterator[str]:
    """Lines that are not blank, until the end of the input."""
    if interactive:
        import readline  # noqa: F401  # gives input() its line editing and history
    while True:
        try:
            text = input("> " if interactive else "").strip()
        except EOFError:
            return
        if text:
            yield text


def _note(usage: dict[str, Any]) -> str:
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    prompt, output = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
    return f"{prompt} prompt tokens, {cached} of them from the cache; {output} generated"
