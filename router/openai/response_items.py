"""The output of a response: messages and calls, and the events by which they grow."""

from collections.abc import Callable
from typing import Any

from ..tool_calls import CallPiece, Piece

Event = tuple[str, dict[str, Any]]
"""Type and fields."""


class ResponseItems:
    """Takes the pieces of an answer, in their order."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        self.items: list[dict[str, Any]] = []
        self._new_id = new_id
        self._open: int | None = None
        """Number of the call that grows; -1: a message does."""

    def add(self, piece: Piece) -> list[Event]:
        """What happens by one more piece."""
        if isinstance(piece, CallPiece):
            return self._add_to_call(piece)
        events = [] if self._open == -1 else [*self.close(), *self._begin_message()]
        self._part["text"] += piece
        return [*events, ("response.output_text.delta", {**self._place(part=True), "delta": piece, "logprobs": []})]

    def close(self, status: str = "completed") -> list[Event]:
        """The item that grows is done."""
        if self._open is None:
            return []
        item = self.items[-1]
        item["status"] = status
        events = self._done_call(item) if self._open >= 0 else self._done_message()
        self._open = None
        return [*events, ("response.output_item.done", {"output_index": len(self.items) - 1, "item": item})]

    @property
    def _part(self) -> dict[str, Any]:
        return self.items[-1]["content"][0]

    def _begin(self, item: dict[str, Any]) -> Event:
        shown = {**item, **({"content": []} if "content" in item else {})}
        self.items.append(item)
        return "response.output_item.added", {"output_index": len(self.items) - 1, "item": shown}

    def _begin_message(self) -> list[Event]:
        self._open = -1
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        item = {"id": f"msg_{self._new_id()}", "type": "message", "status": "in_progress", "role": "assistant"}
        added = self._begin({**item, "content": [part]})
        return [added, ("response.content_part.added", {**self._place(part=True), "part": dict(part)})]

    def _add_to_call(self, piece: CallPiece) -> list[Event]:
        events: list[Event] = []
        if piece.index != self._open:
            events += self.close()
            self._open = piece.index
            ids = {"id": f"fc_{self._new_id()}", "call_id": f"call_{self._new_id()}"}
            item = {**ids, "type": "function_call", "status": "in_progress", "name": piece.name, "arguments": ""}
            added, fields = self._begin(item)
            events.append((added, {**fields, "item": dict(item)}))
        self.items[-1]["arguments"] += piece.arguments
        if piece.arguments:
            events.append(("response.function_call_arguments.delta", {**self._place(), "delta": piece.arguments}))
        return events

    def _done_call(self, item: dict[str, Any]) -> list[Event]:
        done = {**self._place(), "name": item["name"], "arguments": item["arguments"]}
        return [("response.function_call_arguments.done", done)]

    def _done_message(self) -> list[Event]:
        place, part = self._place(part=True), self._part
        return [
            ("response.output_text.done", {**place, "text": part["text"], "logprobs": []}),
            ("response.content_part.done", {**place, "part": part}),
        ]

    def _place(self, *, part: bool = False) -> dict[str, Any]:
        place = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return {**place, "content_index": 0} if part else place
