"""Events of a chat completion whose text may hold tool calls."""

from collections.abc import Callable, Sequence

from ..tool_calls import CallPiece, Piece, ToolCallParser
from .chunks import ChatChunks, ChunkOptions, Envelope, UsageCounter, compact, json_text
from .feed import Arrival


class ToolChunks(ChatChunks):
    """A call's first event has its id and its whole name, those after it pieces of its arguments."""

    def __init__(
        self,
        envelope: Envelope,
        options: ChunkOptions,
        usage: UsageCounter,
        *,
        parsers: Sequence[ToolCallParser],
        new_call_id: Callable[[], str],
        prompt_token_ids: list[int],
    ) -> None:
        """``parsers``: one for each choice."""
        super().__init__(envelope, options, usage, n=len(parsers), prompt_token_ids=prompt_token_ids)
        self._parsers = parsers
        self._new_call_id = new_call_id

    def _choice(self, arrival: Arrival) -> str:
        delta = arrival.delta
        parser = self._parsers[delta.index]
        pieces = parser.push(delta.text) if delta.text else []
        if delta.finish_reason is not None:
            pieces += parser.flush()
        changes = [self._change(piece) for piece in pieces]
        if not changes and self._has_extras(delta):
            changes = [""]
        events = ""
        for index, change in enumerate(changes):  # tokens are reported once
            extras = ("null", "") if index else (self._logprobs(delta), self._ids(delta))
            events += self._event(delta, change, *extras)
        if delta.finish_reason is not None:
            events += self._finish(delta, finish_word(delta.finish_reason, parser))
        return events

    def _change(self, piece: Piece) -> str:
        if not isinstance(piece, CallPiece):
            return f'"content":{json_text(piece)}'
        if piece.name is None:
            return f'"tool_calls":[{{"index":{piece.index},"function":{{"arguments":{json_text(piece.arguments)}}}}}]'
        return (
            f'"tool_calls":[{{"index":{piece.index},"id":{compact(self._new_call_id())},"type":"function",'
            f'"function":{{"name":{json_text(piece.name)},"arguments":{json_text(piece.arguments)}}}}}]'
        )


def finish_word(reason: str, parser: ToolCallParser) -> str:
    """An answer that ends by itself after a call says so."""
    return "tool_calls" if reason == "stop" and parser.num_calls else reason


def message_of(text: str, parser: ToolCallParser, new_call_id: Callable[[], str]) -> dict[str, object]:
    """The assistant's message for a whole answer."""
    content, calls = "", list[dict[str, str]]()
    for piece in (*parser.push(text), *parser.flush()):
        if not isinstance(piece, CallPiece):
            content += piece
        elif piece.name is not None:
            calls.append({"name": piece.name, "arguments": piece.arguments})
        else:
            calls[piece.index]["arguments"] += piece.arguments
    message: dict[str, object] = {"role": "assistant", "content": content, "refusal": None}
    if not calls:
        return message
    listed = [{"id": new_call_id(), "type": "function", "function": call} for call in calls]
    return {**message, "content": content or None, "tool_calls": listed}
