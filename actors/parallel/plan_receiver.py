"""A rank's end of its gang's control plane: plans from the leader, results back."""

import time
from collections import deque
from collections.abc import Callable, Sequence

from ...cluster.errors import RankLostError
from ...router.wire import WireError
from ..engine.plan import StepPlan, StepResult
from ..engine.plan_wire import Delivery, decode_delivery, encode_result
from .link import Hello, Link, connect, frame
from .pulse import SILENCE_S, Pulse


class PlanReceiver:
    """Connects ``rank`` to the leader. All but ``close`` is for one thread: another one would cost a wake-up a plan.

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
        self._deliveries: deque[Delivery | None] = deque()
        """Read, but not asked for yet. None is the end."""
        self._on_lost = on_lost
        self._lost: RankLostError | None = None
        self._step = 0
        try:
            pulse = connect(addresses, token, Hello(rank, "pulse"), end)
        except RankLostError:
            self._link.close()
            raise
        self._pulse = Pulse({"the leader": pulse}, self._lose, silence_s=silence_s)

    def receive(self, deadline_s: float | None = None) -> Delivery | None:
        """The next plan; None when no further one will come. By default it waits as long as the leader lives.

        Asking for a plan says that the one before is done with. Raises RankLostError, also when ``deadline_s`` passes.
        """
        self._pulse.progress = self._step
        while not self._deliveries:
            if deadline_s is not None and not self._link.has_news(deadline_s):
                raise RankLostError(f"the leader sent no plan within {deadline_s:g} s")
            self._read()
        delivery = self._deliveries.popleft()
        if delivery is None:
            self._deliveries.append(None)  # for whoever asks again
        else:
            self._step = delivery.plan.step
        return delivery

    def next_plan(self) -> StepPlan | None:
        """The plan that ``receive`` will give next, if it has come. Raises RankLostError."""
        while not self._deliveries and self._link.has_news(0.0):
            self._read()
        following = self._deliveries[0] if self._deliveries else None
        return None if following is None else following.plan

    def reply(self, result: StepResult) -> None:
        """Send a result. A rank that does not sample does so only for an error. Raises RankLostError.

        Nobody wants a result after the leader has closed the gang: that is no loss.
        """
        try:
            self._link.exchange(frame(encode_result(result)), self._read)
        except RankLostError:
            while None not in self._deliveries:  # it may have said that it closes
                self._read()

    def close(self) -> None:
        """Disconnect. Idempotent."""
        self._pulse.close()
        self._link.close()

    def _read(self) -> None:
        """Take in what has come, or comes next."""
        try:
            for body in self._link.receive():
                self._deliveries.append(decode_delivery(body) if body else None)
        except WireError as error:
            raise RankLostError(f"the leader sends nonsense: {error.message}") from error
        except RankLostError as error:
            raise self._lost or error from None

    def _lose(self, error: RankLostError) -> None:
        """From the thread of the pulse: who waits for a plan is woken, who computes is told otherwise."""
        self._lost = error
        self._link.shut()
        if self._on_lost is not None:
            self._on_lost(error)
