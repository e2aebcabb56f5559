"""When requests must be done."""

import heapq
from collections.abc import Container, Iterator

from ...cluster.ids import RequestId

_MAX_STALE = 1024


class Deadlines:
    """A heap of (seconds of any clock, request). False while it is empty."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, RequestId]] = []
        self._limit = _MAX_STALE

    def __bool__(self) -> bool:
        return bool(self._heap)

    def put(self, deadline: float, request_id: RequestId) -> None:
        """A request must be done by then."""
        heapq.heappush(self._heap, (deadline, request_id))

    def passed(self, now: float, known: Container[RequestId]) -> Iterator[RequestId]:
        """Those of ``known`` whose time is up, each once."""
        while self._heap and self._heap[0][0] <= now:
            request_id = heapq.heappop(self._heap)[1]
            if request_id in known:
                yield request_id
        if len(self._heap) > self._limit:
            self._heap = [entry for entry in self._heap if entry[1] in known]
            heapq.heapify(self._heap)
            self._limit = 2 * len(self._heap) + _MAX_STALE
