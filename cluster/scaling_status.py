"""What is told of a model's scaling to whoever looks: the latest decision, and those that changed something."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from .scaling import Decision

LOG_LENGTH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingStatus:
    """Of one model whose number of replicas follows the work."""

    model: str
    latest: Decision
    log: tuple[Decision, ...] = ()
    """The last ``LOG_LENGTH`` decisions that changed the number, or for which the strongest signal was another one
    than before; newest last.
    """
    changes: Mapping[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])
    """(``up`` or ``down``, signal) to decisions that changed the number."""

    def then(self, decision: Decision) -> "ScalingStatus":
        """With one more decision."""
        last, changes = self.latest, self.changes
        if decision.target != decision.before:
            key = ("up" if decision.target > decision.before else "down"), decision.signal
            changes = {**changes, key: changes.get(key, 0) + 1}
        told = decision.target != decision.before or decision.signal != last.signal
        log = (*self.log, decision)[-LOG_LENGTH:] if told else self.log
        return ScalingStatus(model=self.model, latest=decision, log=log, changes=changes)


def first_status(model: str, decision: Decision) -> ScalingStatus:
    """Before which nothing was decided."""
    before = ScalingStatus(model=model, latest=decision)
    return ScalingStatus(model=model, latest=decision, log=(decision,), changes=before.then(decision).changes)
