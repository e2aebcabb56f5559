"""A rank's end of its gang's control plane: plans from the leader, results back."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue

from ...cluster.errors import RankLostError
from ...router.wire import WireError
from ..engine.plan import StepPlan, StepResult
from ..engine.plan_wire import Delivery, decode_delivery, encode_result
from .link import Hello, Link, connect, frame
from .pulse import SILENCE_S, Pulse

_SETTLE_S = 1.0


class PlanReceiver:
    """Connects ``rank`` to the leader. A thread reads ahead, so that several plans may be in flight.

    When the leader is gone, hangs or is cut off, ``receive`` raises RankLostError within ``silence_s``; ``on_lost`` is
    called at once from another thread, for a rank that is inside a collective.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        token: str,
        rank: int,
        *,
        connect_s: float = 30.0,
        deadline_s: float = 30.0,
        silence_s: float = SILENCE_S,
        on_lost: Callable[[RankLostError], None] | None = None,
    ) -> None:
        """Raises RankLostError if the leader lets it in at none of ``addresses`` within ``connect_s``."""
        end = time.monotonic() + connect_s
        plans = connect(addresses, token, Hello(rank, "plans"), end)
        self._link = Link(plans, "the leader", deadline_s=deadline_s)
        self._deliveries: SimpleQueue[Delivery | RankLostError | None] = SimpleQueue()
        self._ahead: deque[Delivery | RankLostError | None] = deque()
        """Taken from the queue already, by ``next_plan``."""
        self._on_lost = on_lost
        self._step = 0
        self._closing = False
        self._ended = False
        try:
            pulse = connect(addresses, token, Hello(rank, "pulse"), end)
        except RankLostError:
            self._link.close()
            raise
        self._pulse = Pulse({"the leader": pulse}, self._lose, silence_s=silence_s)
        self._thread = threading.Thread(target=self._read, name="plans", daemon=True)
        self._thread.start()

    def receive(self, deadline_s: float | None = None) -> Delivery | None:
        """The next plan; None when no further one will come. By default it waits as long as the leader lives.

        Asking for a plan says that the one before is done with. Raises RankLostError, also when ``deadline_s`` passes.
        """
        self._pulse.progress = self._step
        try:
            delivery = self._ahead.popleft() if self._ahead else self._deliveries.get(timeout=deadline_s)
        except Empty:
            raise RankLostError(f"the leader sent no plan within {deadline_s:g} s") from None
        if isinstance(delivery, RankLostError):
            self._deliveries.put(delivery)  # for whoever asks again
            raise delivery
        if delivery is not None:
            self._step = delivery.plan.step
        return delivery

    def next_plan(self) -> StepPlan | None:
        """The plan that ``receive`` will give next, if it has come."""
        if not self._ahead:
            try:
                self._ahead.append(self._deliveries.get_nowait())
            except Empty:
                return None
        delivery = self._ahead[0]
        return delivery.plan if isinstance(delivery, Delivery) else None

    def reply(self, result: StepResult) -> None:
        """Send a result. A rank that does not sample does so only for an error. Raises RankLostError.

        Nobody wants a result after the leader has closed the gang: that is no loss.
        """
        try:
            self._link.send(frame(encode_result(result)))
        except RankLostError:
            self._thread.join(_SETTLE_S)  # it may be about to read that the leader has closed
            if not self._ended:
                raise

    def close(self) -> None:
        """Disconnect. Idempotent."""
        self._closing = True
        self._pulse.close()
        self._link.shut()
        self._thread.join()
        self._link.close()

    def _read(self) -> None:
        try:
            while True:
                for body in self._link.receive():
                    if not body:
                        self._ended = True
                        self._deliveries.put(None)
                        return
                    self._deliveries.put(decode_delivery(body))
        except RankLostError as error:
            self._lose(error)
        except WireError as error:
            self._lose(RankLostError(f"the leader sends nonsense: {error.message}"))

    def _lose(self, error: RankLostError) -> None:
        if self._closing:
            return
        self._deliveries.put(error)
        if self._on_lost is not None:
            self._on_lost(error)
