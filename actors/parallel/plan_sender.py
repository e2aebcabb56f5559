"""The leader's end of a gang's control plane: plans to all ranks, results from those that sample."""

import selectors
import socket
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

from ...cluster.errors import RankLostError
from ...cluster.ids import RequestId
from ...router.wire import WireError
from ..engine.plan import StepPlan, StepResult
from ..engine.plan_wire import Delivery, decode_result, encode_delivery
from .link import Hello, Link, Listener, Purpose, frame
from .pulse import SILENCE_S, Pulse
from .traffic import Traffic

_PURPOSES: tuple[Purpose, Purpose] = ("plans", "pulse")
_Sampled = list[tuple[RequestId, list[int]]]
_END = frame(b"")
"""No further plan will come."""


class PlanSender:
    """Sends plans to ``num_ranks`` ranks and receives results. Blocks; every wait has a deadline.

    All but ``close`` is for one thread. A rank that dies, hangs or is cut off shows as RankLostError within
    ``silence_s``: in the call that runs, in every later one, and by ``on_lost``, which is called from another thread.
    """

    def __init__(
        self,
        num_ranks: int,
        token: str,
        *,
        host: str = "127.0.0.1",
        sampling_ranks: Sequence[int] = (0,),
        groups: Sequence[Sequence[int]] | None = None,
        deadline_s: float = 30.0,
        silence_s: float = SILENCE_S,
        on_lost: Callable[[RankLostError], None] | None = None,
        traffic: Traffic | None = None,
    ) -> None:
        """``host`` is this machine's address as the ranks reach it; ``deadline_s`` is a step's.

        Every rank is in one of ``groups``, which have plans of their own; by default there is one group.
        """
        self.num_ranks = num_ranks
        self.traffic = traffic or Traffic()
        self._listener = Listener(token, host)
        self.addresses = self._listener.addresses
        """What the ranks connect to, best first."""
        self._sampling_ranks = frozenset(sampling_ranks)
        self._deadline_s = deadline_s
        self._silence_s = silence_s
        self._on_lost = on_lost
        self._links: dict[int, Link] = {}
        self._selector = selectors.DefaultSelector()
        self._pulse: Pulse | None = None
        self._lost: RankLostError | None = None
        self._steps: deque[int] = deque()
        self._answers: defaultdict[int, dict[int, StepResult]] = defaultdict(dict)
        self._results: deque[dict[int, StepResult]] = deque()
        """By the rank that gave it."""
        self._groups = groups or [range(num_ranks)]
        self._sampled: list[_Sampled] = [[] for _ in self._groups]

    def accept(self, deadline_s: float) -> None:
        """Wait until every rank has connected. Raises RankLostError, naming those that have not."""
        end = time.monotonic() + deadline_s
        sockets: dict[Hello, socket.socket] = {}
        missing = {Hello(rank, purpose) for rank in range(self.num_ranks) for purpose in _PURPOSES}
        while missing:
            accepted = self._listener.accept(end)
            if accepted is None:
                for connection in sockets.values():
                    connection.close()
                names = sorted({f"rank {hello.rank}" for hello in missing})
                raise RankLostError(f"{' and '.join(names)} did not connect within {deadline_s:g} s")
            hello, connection = accepted
            if hello in sockets:  # it came again: the first attempt had failed on its side
                sockets[hello].close()
            sockets[hello] = connection
            missing.discard(hello)
        self._watch(sockets)

    def _watch(self, sockets: dict[Hello, socket.socket]) -> None:
        self._listener.close()
        for rank in range(self.num_ranks):
            link = Link(sockets[Hello(rank, "plans")], f"rank {rank}", deadline_s=self._deadline_s)
            self._links[rank] = link
            self._selector.register(link, selectors.EVENT_READ, rank)
        pulses = {f"rank {rank}": sockets[Hello(rank, "pulse")] for rank in range(self.num_ranks)}
        self._pulse = Pulse(pulses, self._lose, silence_s=self._silence_s)

    def send(self, *plans: StepPlan) -> None:
        """Send each group its plan of a step, with the tokens it sampled since the last one. Raises RankLostError."""
        self._check()
        for group, (plan, ranks) in enumerate(zip(plans, self._groups, strict=True)):
            delivery, self._sampled[group] = Delivery(plan, tuple(self._sampled[group])), []
            framed = frame(encode_delivery(delivery))
            for rank in ranks:
                self._guarded(lambda link=self._links[rank], framed=framed: link.send(framed))
                self.traffic.add("plan", len(framed))
        self._steps.append(plans[0].step)

    def result(self, deadline_s: float | None = None) -> StepResult:
        """The result of the oldest plan that has none yet. Raises RankLostError.

        It joins what the sampling ranks answered; an error that any rank reports is the whole step's.
        """
        wait_s = self._deadline_s if deadline_s is None else deadline_s
        end = time.monotonic() + wait_s
        while not self._results:
            self._check()
            ready = self._selector.select(max(0.0, end - time.monotonic()))
            if not ready and time.monotonic() >= end:
                self._lose(
                    RankLostError(f"step {self._steps[0]} took longer than {wait_s:g} s: {self._who_is_where()}")
                )
            for key, _ in ready:
                rank = cast(int, key.data)
                self._guarded(lambda rank=rank: self._read(rank))
        self._steps.popleft()
        answers = self._results.popleft()
        for group, ranks in enumerate(self._groups):
            for rank in ranks:
                self._sampled[group] += _sampled_tokens(answers.get(rank))
        first, *others = answers.values()
        return replace(first, sequences=first.sequences + [row for other in others for row in other.sequences])

    def progress(self) -> dict[str, int]:
        """The last step that each rank had done with when it last said so."""
        return {} if self._pulse is None else self._pulse.progress_of_peers()

    def close(self) -> None:
        """Tell the ranks that no further plan will come, and disconnect. Idempotent."""
        if self._lost is None:
            self._lost = RankLostError("the leader has closed the gang")
            for link in self._links.values():
                self._part(link)
        if self._pulse is not None:
            self._pulse.close()
        for link in self._links.values():
            link.close()
        self._selector.close()
        self._listener.close()

    def _read(self, rank: int) -> None:
        for body in self._links[rank].receive():
            self.traffic.add("result", len(body))
            try:
                result = decode_result(body)
            except WireError as error:
                raise RankLostError(f"rank {rank} sends nonsense: {error.message}") from error
            if result.error is not None:
                self._results.append({rank: StepResult(step=result.step, error=f"rank {rank}: {result.error}")})
            elif rank in self._sampling_ranks:
                self._gather(rank, result)

    def _gather(self, rank: int, answer: StepResult) -> None:
        answers = self._answers[answer.step]
        answers[rank] = answer
        if len(answers) == len(self._sampling_ranks):
            del self._answers[answer.step]
            self._results.append({rank: answers[rank] for rank in sorted(answers)})

    def _who_is_where(self) -> str:
        return ", ".join(f"{name} is through with {step}" for name, step in self.progress().items())

    def _guarded(self, call: Callable[[], None]) -> None:
        try:
            call()
        except RankLostError as error:
            self._lose(error)
            self._check()

    def _check(self) -> None:
        if self._lost is not None:
            raise self._lost

    def _lose(self, error: RankLostError) -> None:
        """The first loss counts: what follows from it would only mislead."""
        if self._lost is not None:
            return
        self._lost = error
        for link in self._links.values():
            link.shut()
        if self._on_lost is not None:
            self._on_lost(error)

    @staticmethod
    def _part(link: Link) -> None:
        try:
            link.send(_END)
        except RankLostError:  # then it needs no word
            link.shut()


def _sampled_tokens(answer: StepResult | None) -> _Sampled:
    return [] if answer is None else [(row.request_id, row.token_ids) for row in answer.sequences if row.token_ids]
