"""What a storm must not have done: each finding is a line, and no line is the aim."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from .answers import Answer, Verdict, compare
from .clients import Outcome
from .site import Found, Site
from .storm import Event

CUT_WITHIN_S = 30.0
"""A connection that breaks this long after a fault has been broken by it; a cut link is noticed late."""
AUDITED_WITHIN_S = 5.0
MOST_NEW_DESCRIPTORS = 32
"""Connections to what was started anew, kept until the old ones are forgotten."""


@dataclass(frozen=True, slots=True)
class Wrong:
    """An answer that is not the undisturbed one."""

    outcome: Outcome
    answer: Answer
    verdict: Verdict

    def __str__(self) -> str:
        ask = self.outcome.ask
        return f"request {ask.number} ({ask.kind}): {self.verdict.why}"


@dataclass(slots=True)
class Judgement:
    """Of all requests of a storm."""

    equal: int = 0
    wrong: list[Wrong] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    logprob_error: float = 0.0
    tokens: int = 0
    """Compared."""

    def take(self, outcome: Outcome, right: Answer) -> None:
        """Compare what came, also over connections that broke."""
        ask = outcome.ask
        if outcome.lost:
            self.lost.append(f"request {ask.number} ({ask.kind}): {outcome.lost}")
        for answer in outcome.beginnings:
            self._note(outcome, answer, compare(right, answer, complete=False))
        self._note(outcome, outcome.answer, compare(right, outcome.answer, complete=outcome.complete))

    def _note(self, outcome: Outcome, answer: Answer, verdict: Verdict) -> None:
        self.logprob_error = max(self.logprob_error, verdict.logprob_error)
        self.tokens += sum(len(choice.token_ids) for choice in answer.values())
        if verdict.why:
            self.wrong.append(Wrong(outcome, answer, verdict))
        else:
            self.equal += 1


def judge(outcomes: Sequence[Outcome], reference: Sequence[Answer]) -> Judgement:
    """Hold every answer against the undisturbed one, which stands at the request's number."""
    judgement = Judgement()
    for outcome in outcomes:
        judgement.take(outcome, reference[outcome.ask.number])
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
    old, new = before.roles(), after.roles()
    problems = [
        f"orphans: {new[role]} {role} processes, before {old[role]}"
        for role in sorted(old.keys() | new.keys())
        if old[role] != new[role]
    ]
    for one in after.found:
        key = (one.host.name, one.process.inner_pid)
        gained = after.descriptors.get(key, 0) - before.descriptors.get(key, after.descriptors.get(key, 0))
        if gained > MOST_NEW_DESCRIPTORS:
            problems.append(f"descriptors: {one.name} has {gained} more than before")
    segments = {host: (before.shared_memory[host], names) for host, names in after.shared_memory.items()}
    more = sum(len(names) for _, names in segments.values()) - sum(len(names) for names, _ in segments.values())
    if more > 0:
        gained = {host: sorted(names - known) for host, (known, names) in segments.items()}
        problems.append(f"leaked: {more} segments of shared memory among {gained}")
    return problems


def not_audited(site: Site) -> list[str]:
    """Requests that are sent now, to all ingresses, and do not come into the audit log: it has not outlived a disk."""
    names = [f"at-rest-{number}" for number in range(4 * site.size.ingresses)]
    for number, name in enumerate(names):
        url = site.urls[number % len(site.urls)] + "/v1/models"
        with suppress(httpx.HTTPError):
            httpx.get(url, headers=site.headers | {"x-request-id": name}, timeout=3.0, trust_env=False)
    deadline = time.monotonic() + AUDITED_WITHIN_S
    while (missing := [name for name in names if name not in site.audited()]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return [f"audit: {name} is not in the log" for name in missing]


def left_behind(site: Site) -> list[str]:
    """What still runs of an application that was taken down."""
    return [f"orphans: {one.name} outlives the application" for one in site.find("replica", "rank", "ingress")]
