"""The body of a response, and its stream of events."""

from collections.abc import Callable
from typing import Any

from ..output import OutputDelta
from ..tool_calls import ToolCallParser
from .chunks import UsageCounter, compact
from .feed import Arrival
from .response_items import Event, ResponseItems
from .response_request import ResponseRequest

_STATUS = {"stop": "completed", "length": "incomplete", "abort": "incomplete"}


class ResponseWriter:
    """Makes one response of the deltas of an answer: ``body`` is the whole of it, the rest are events."""

    def __init__(
        self,
        head: dict[str, Any],
        request: ResponseRequest,
        usage: UsageCounter,
        parser: ToolCallParser | None,
        new_id: Callable[[], str],
    ) -> None:
        """``head`` are id, time and model; without a ``parser`` there are no tools."""
        self._head = head
        self._request = request
        self._usage = usage
        self._parser = parser
        self._items = ResponseItems(new_id)
        self._number = 0
        self._status = "in_progress"
        self._is_cut = False

    def body(self) -> dict[str, Any]:
        """The response as it is now."""
        request, done = self._request, self._status != "in_progress"
        text = request.text.model_dump(by_alias=True, exclude_none=True) if request.text is not None else {}
        tools = [tool.model_dump() for tool in request.tools or ()]
        choice = request.tool_choice
        return {
            **self._head,
            "status": self._status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if self._is_cut else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "output": self._items.items,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "text": {"format": {"type": "text"}, **text},
            "tool_choice": choice if isinstance(choice, str) else "auto" if choice is None else choice.model_dump(),
            "tools": tools,
            "top_p": 1.0 if request.top_p is None else request.top_p,
            "truncation": request.truncation or "disabled",
            "usage": self._usage_body() if done else None,
            "metadata": request.metadata or {},
        }

    def begin(self) -> str:
        """Events before the first delta."""
        return "".join(
            self._event(kind, {"response": self.body()}) for kind in ("response.created", "response.in_progress")
        )

    def write(self, arrival: Arrival) -> str:
        """The events of one delta."""
        self._usage.count(arrival)
        return "".join([self._event(*event) for event in self.take(arrival.delta)])

    def end(self) -> str:
        """The last event."""
        return self._event(f"response.{self._status}", {"response": self.body()})

    def fail(self, error: dict[str, Any]) -> str:
        """The event that ends a stream which cannot go on."""
        detail = error["error"]
        return self._event("error", {name: detail[name] for name in ("code", "message", "param")})

    def take(self, delta: OutputDelta) -> list[Event]:
        """What happens by one delta."""
        text, parser = delta.text, self._parser
        pieces: list[Any] = [text] if text else []
        if parser is not None:
            pieces = parser.push(text) + ([] if delta.finish_reason is None else parser.flush())
        events = [event for piece in pieces for event in self._items.add(piece)]
        if delta.finish_reason is not None:
            self._status, self._is_cut = _STATUS[delta.finish_reason], delta.finish_reason == "length"
            events += self._items.close(self._status)
        return events

    def _event(self, kind: str, fields: dict[str, Any]) -> str:
        data = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return f"event: {kind}\ndata: {compact(data)}\n\n"

    def _usage_body(self) -> dict[str, Any]:
        usage = self._usage.usage()
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
