"""An engine inside this process, on a thread of its own."""

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from ..cluster.engine_counts import EngineCounts
from ..cluster.errors import EngineError, InvalidRequestError
from ..cluster.ids import BlockHash, RequestId
from ..cluster.messages import FinishReason, GenerateRequest, Load, TokenDelta
from ..cluster.weights_update import UpdateMode
from ..kv_store.events import KvEvent
from .engine.engine import Engine
from .engine.executor import Executor
from .engine.joint import JointEngine

DeltaSink = Callable[[list[TokenDelta]], None]
EventSink = Callable[[list[KvEvent]], None]
FailureSink = Callable[[str], None]

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Change:
    """Of weights, on its way."""

    version: str
    namespace: BlockHash
    mode: UpdateMode
    submitted: bool = False
    done: "Future[None]" = field(default_factory=Future[None])


def ignore(news: object) -> None:
    """For engines that nobody routes to."""


class LocalEngine:
    """Steps while there is work and sleeps while there is none; every method may be called from any thread.

    The sinks are called on the engine's thread and must be quick: ``on_deltas`` once per step with all its deltas,
    none of a request after its ``abort`` has returned; ``on_events`` with what entered and left the cache, in order;
    ``on_failure`` once, after the last deltas, with the reason for which nothing runs here any more.
    """

    def __init__(
        self,
        engine: Engine | JointEngine,
        executor: Executor,
        on_deltas: DeltaSink,
        on_events: EventSink = ignore,
        on_failure: FailureSink = ignore,
    ) -> None:
        """Takes ``engine`` and the ``executor`` it was made with, and starts the thread."""
        self._engine = engine
        self._executor = executor
        self._on_deltas = on_deltas
        self._on_events = on_events
        self._on_failure = on_failure
        self._changed = threading.Condition()
        """Guards the engine. Not held while the executor computes, so that callers never wait for a step."""
        self._snapshots: list[Future[list[KvEvent]]] = []
        self._change: _Change | None = None
        self._closing = False
        self._failure: str | None = None
        self._thread = threading.Thread(target=self._run, name="warmroot-engine", daemon=True)
        self._thread.start()

    @property
    def healthy(self) -> bool:
        """False once the engine has failed or was closed."""
        return self._failure is None and not self._closing

    @property
    def max_tokens(self) -> int:
        """Prompt and output tokens that one sequence can have here."""
        return self._engine.max_tokens

    def add(self, request: GenerateRequest) -> None:
        """Queue a request. Raises what ``Engine.add`` raises, EngineError after a failure or ``close``."""
        with self._changed:
            self._check()
            self._engine.add(request)
            self._changed.notify()

    def abort(self, request_id: RequestId) -> None:
        """Forget a request and free its blocks. Unknown and ended ones are ignored."""
        with self._changed:
            self._engine.abort(request_id)

    def load(self) -> Load:
        """How busy it is."""
        with self._changed:
            return self._engine.load()

    def counts(self) -> EngineCounts:
        """What was done since the start."""
        with self._changed:
            return self._engine.counts()

    def remaining(self) -> dict[RequestId, int]:
        """Tokens that each running request may still generate."""
        with self._changed:
            return self._engine.remaining()

    def snapshot(self) -> "Future[list[KvEvent]]":
        """All that is cached; earlier events have gone to ``on_events`` by then. Raises EngineError as ``add``."""
        future: Future[list[KvEvent]] = Future()
        with self._changed:
            self._check()
            self._snapshots.append(future)
            self._changed.notify()
        return future

    def change_weights(self, version: str, namespace: BlockHash, mode: UpdateMode) -> "Future[None]":
        """Adopt the weights that the executor has prepared as ``version``; done once it computes with them.

        With ``wait`` nothing new starts until all that has begun is through; ``withdraw`` ends that. Raises
        EngineError while another change is under way, and as ``add``.
        """
        change = _Change(version, namespace, mode)
        with self._changed:
            self._check()
            if self._change is not None:
                raise EngineError(f"the change to weights {self._change.version} is still under way")
            self._change = change
            self._engine.hold(True)
            self._changed.notify()
        return change.done

    def withdraw(self) -> bool:
        """Give up a change that waits; False: there is none, or it is too late."""
        with self._changed:
            if self._change is None or self._change.submitted:
                return False
            self._change = None
            self._engine.hold(False)
            self._changed.notify()
            return True

    def fail(self, message: str) -> None:
        """What computes here is lost: end what is open with an error, after the step that runs. Later calls change
        nothing.
        """
        with self._changed:
            self._failure = self._failure or message
            self._changed.notify()

    def close(self) -> None:
        """Stop after the step that runs, end what is open with an error, release the executor. Idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _check(self) -> None:
        if self._closing:
            raise EngineError("the engine was closed")
        if self._failure is not None:
            raise EngineError(self._failure)

    def _run(self) -> None:
        while self._wait():
            self._try_step()
        failure = self._failure
        self._fail(failure or "the engine was closed")
        for snapshot in self._snapshots:
            snapshot.cancel()
        if failure is not None:
            self._on_failure(failure)
        self._executor.shutdown()

    def _wait(self) -> bool:
        """Sleep until there is something to do; False: end."""
        with self._changed:
            self._changed.wait_for(lambda: not self.healthy or self._snapshots or self._change or self._engine.has_work)
            return self.healthy

    def _try_step(self) -> None:
        try:
            self._step()
        except Exception as error:  # a fault of engine or sinks: whoever waits must hear of it
            logger.exception("the engine has failed")
            self._fail(f"{type(error).__name__}: {error}")

    def _step(self) -> None:
        with self._changed:
            self._try_to_change()
            running = self._engine.has_work and self._engine.begin_all()
        result = self._executor.result() if running else None
        with self._changed:
            deltas = self._engine.take_pending() if result is None else self._engine.end(result)
            if result is not None and self._failure is None:
                self._failure = result.error
            self._see_change_through()
            events = self._engine.drain_events()
            snapshots, self._snapshots = self._snapshots, []
            cached: list[KvEvent] = list(self._engine.snapshot_events()) if snapshots else []
            try:
                if self._failure is None:
                    self._engine.begin_all()  # the executor computes while the sinks work
            finally:
                # Still under the lock: whoever has aborted a request knows that all of its deltas are out.
                if deltas:
                    self._on_deltas(deltas)
                if events:
                    self._on_events(events)
        for snapshot in snapshots:
            if snapshot.set_running_or_notify_cancel():
                snapshot.set_result(cached)

    def _try_to_change(self) -> None:
        change, engine = self._change, self._engine
        if change is None or change.submitted or (change.mode == "wait" and engine.num_begun):
            return
        if change.mode == "abort":
            engine.abort_begun()
        engine.adopt(change.version, change.namespace)
        engine.hold(False)
        change.submitted = True

    def _see_change_through(self) -> None:
        change = self._change
        if change is not None and change.submitted and self._engine.weights_version == change.version:
            self._change = None
            change.done.set_result(None)

    def _fail(self, message: str) -> None:
        """Nothing runs any more: end every stream with an error."""
        with self._changed:
            self._failure = self._failure or message
            change, self._change = self._change, None
            deltas = self._engine.fail(message)
        if change is not None:
            change.done.set_exception(EngineError(message))
        try:
            if deltas:
                self._on_deltas(deltas)
        except Exception:  # it may be the sink that failed
            logger.exception("cannot report that the engine has failed")


class LocalGenerator:
    """One engine in this process as a ``TokenGenerator`` for one event loop."""

    def __init__(self, start: Callable[[DeltaSink], LocalEngine], loop: asyncio.AbstractEventLoop) -> None:
        """``start`` makes the engine for a sink; deltas reach ``loop`` with one call per step."""
        self._loop = loop
        self._streams: dict[RequestId, asyncio.Queue[TokenDelta]] = {}
        self.engine = start(self._on_deltas)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        """See ``TokenGenerator``. Raises EngineError when the engine fails meanwhile."""
        if request.request_id in self._streams:
            raise InvalidRequestError(f"request {request.request_id} is running already", param="request_id")
        self._streams[request.request_id] = asyncio.Queue()
        reason: FinishReason | None = None
        try:
            # A request of this id may have been aborted just now: what it still had under way goes to that queue.
            await asyncio.sleep(0)
            deltas = self._streams[request.request_id] = asyncio.Queue()
            self.engine.add(request)
            while reason is None:
                delta = await deltas.get()
                reason = delta.finish_reason
                if reason is not None and reason.is_failure:
                    raise EngineError(delta.error or "the engine has failed")
                yield delta
        finally:
            del self._streams[request.request_id]
            if reason is None:
                self.engine.abort(request.request_id)

    def close(self) -> None:
        """Close the engine; open streams end with EngineError."""
        self.engine.close()

    def _on_deltas(self, deltas: list[TokenDelta]) -> None:
        self._loop.call_soon_threadsafe(self._deliver, deltas)

    def _deliver(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            stream = self._streams.get(delta.request_id)
            if stream is not None:
                stream.put_nowait(delta)
