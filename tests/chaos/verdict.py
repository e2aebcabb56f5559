"""What a storm must not have done: each finding is a line, and no line is the aim."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .answers import Answer, Verdict, compare
from .clients import Outcome
from .reference import Gaps
from .site import Found, Site
from .storm import Event

CUT_WITHIN_S = 30.0
"""A connection that breaks this long after a fault has been broken by it; a cut link is noticed late."""
MOST_NEW_DESCRIPTORS = 32
"""Connections to what was started anew, kept until the old ones are forgotten."""

Reference = Mapping[int, tuple[Answer, Gaps]]


@dataclass(slots=True)
class Judgement:
    """Of all requests of a storm."""

    verdicts: Counter[str] = field(default_factory=Counter)
    ties: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    logprob_error: float = 0.0
    tokens: int = 0
    """Compared."""

    def take(self, outcome: Outcome, right: Answer, gaps: Gaps) -> None:
        """Compare what came, also over connections that broke."""
        ask = outcome.ask
        greedy = bool(gaps)
        for answer in outcome.beginnings:
            self._note(outcome, compare(right, answer, complete=False, greedy=greedy, gaps=gaps), answer)
        if outcome.lost:
            self.verdicts["lost"] += 1
            self.problems.append(f"lost: request {ask.number} ({ask.kind}): {outcome.lost}")
            return
        self._note(
            outcome, compare(right, outcome.answer, complete=outcome.complete, greedy=greedy, gaps=gaps), outcome.answer
        )

    def _note(self, outcome: Outcome, verdict: Verdict, answer: Answer) -> None:
        self.verdicts[verdict.word] += 1
        self.logprob_error = max(self.logprob_error, verdict.logprob_error)
        self.tokens += sum(len(choice.token_ids) for choice in answer.values())
        told = f"request {outcome.ask.number} ({outcome.ask.kind}): {verdict.why}"
        if verdict.word == "tie":
            self.ties.append(told)
        elif verdict.word == "wrong":
            self.problems.append(f"wrong: {told}")


def judge(outcomes: Sequence[Outcome], reference: Reference) -> Judgement:
    """Hold every answer against the undisturbed one."""
    judgement = Judgement()
    for outcome in outcomes:
        judgement.take(outcome, *reference[outcome.ask.number])
    return judgement


def unexplained_cuts(outcomes: Sequence[Outcome], events: Sequence[Event]) -> list[str]:
    """Connections that broke though nothing was taken away that they go through."""
    cutting = [(e.at, (e.healed or e.at) + CUT_WITHIN_S) for e in events if e.fault.may_cut and e.target]
    return [
        f"cut: request {outcome.ask.number} ({outcome.ask.kind}): {how}"
        for outcome in outcomes
        for moment, how in outcome.cuts
        if not any(began <= moment <= ended for began, ended in cutting)
    ]


@dataclass(frozen=True, slots=True)
class Inventory:
    """The site's processes at rest."""

    found: Sequence[Found]
    descriptors: Mapping[tuple[str, int], int]
    """By host and process id there."""
    shared_memory: Mapping[str, frozenset[str]]
    """Names of segments, by host."""

    @classmethod
    def of(cls, site: Site) -> "Inventory":
        """Now."""
        found = site.find()
        counts = {(one.host.name, one.process.inner_pid): one.num_descriptors() for one in found}
        segments = {
            host.name: frozenset(path.name for path in Path(f"/proc/{host.init}/root/dev/shm").iterdir())
            for host in site.lan.hosts
        }
        return cls(found, {key: count for key, count in counts.items() if count is not None}, segments)

    def roles(self) -> Counter[str]:
        """How many processes of each role."""
        return Counter(one.role for one in self.found)


def changes(before: Inventory, after: Inventory) -> list[str]:
    """Processes too many or too few, descriptors that survivors have gained, and shared memory of the dead."""
    problems = [
        f"orphans: {after.roles()[role]} {role} processes, before {before.roles()[role]}"
        for role in sorted(before.roles().keys() | after.roles().keys())
        if before.roles()[role] != after.roles()[role]
    ]
    for one in after.found:
        key = (one.host.name, one.process.inner_pid)
        gained = after.descriptors.get(key, 0) - before.descriptors.get(key, after.descriptors.get(key, 0))
        if gained > MOST_NEW_DESCRIPTORS:
            problems.append(f"descriptors: {one.name} has {gained} more than before")
    segments = {host: (before.shared_memory[host], names) for host, names in after.shared_memory.items()}
    more = sum(len(names) for _, names in segments.values()) - sum(len(names) for names, _ in segments.values())
    if more > 0:
        new = {host: sorted(names - old) for host, (old, names) in segments.items()}
        problems.append(f"leaked: {more} segments of shared memory among {new}")
    return problems


def left_behind(site: Site) -> list[str]:
    """What still runs of an application that was taken down."""
    return [f"orphans: {one.name} outlives the application" for one in site.find("replica", "rank", "ingress")]
