"""The loop: batches, AdamW, a learning rate that follows the clock, and a state from which it can go on."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from ...cluster.errors import ConfigError

_SAVE_S = 120.0
_WARM = 0.03
_CLIP = 1.0


class Task(Protocol):
    """What is learnt."""

    @property
    def num_examples(self) -> int:
        """Each is seen once per epoch."""
        ...

    def loss(self, rows: torch.Tensor) -> torch.Tensor:
        """Scalar, of the examples [B] int64."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """It ends when its time is up or all epochs are over, whichever comes first; the learning rate falls towards it."""

    seconds: float
    epochs: float
    batch_size: int
    learning_rate: float

    def rate(self, done: float) -> float:
        """Learning rate when a share of the way, 0 to 1, is done: a short rise, then a cosine."""
        if done < _WARM:
            return self.learning_rate * (0.1 + 0.9 * done / _WARM)
        return self.learning_rate * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


@dataclass(frozen=True, slots=True)
class Step:
    """What one step was."""

    done: float
    """Share of the way, 0 to 1."""
    loss: float
    """In nats."""
    seconds: float
    """Of training, earlier runs included."""


@dataclass(slots=True)
class _State:
    seconds: float = 0.0
    examples: int = 0
    losses: list[tuple[float, float]] = field(default_factory=list)
    """(seconds, loss) of every step."""


class Trainer:
    """Trains a module. ``clock`` gives seconds, monotonic."""

    def __init__(
        self, module: nn.Module, task: Task, schedule: Schedule, state: Path, clock: Callable[[], float]
    ) -> None:
        """Goes on from the file ``state`` if there is one. Raises ConfigError if it is of something else."""
        self._module = module
        self._task = task
        self._schedule = schedule
        self._path = state
        self._clock = clock
        learning = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._learning = learning
        # Vectors (norms, biases) do not decay.
        matrices, vectors = ([p for p in learning if (p.dim() > 1) is is_matrix] for is_matrix in (True, False))
        self._optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}],
            lr=schedule.learning_rate,
            betas=(0.9, 0.95),
            fused=True,
        )
        self._state = _State()
        if state.exists():
            self._resume()

    @property
    def losses(self) -> list[tuple[float, float]]:
        """(seconds, loss) of every step so far."""
        return self._state.losses

    @property
    def epochs(self) -> float:
        """How often every example was seen."""
        return self._state.examples / self._task.num_examples

    def run(self) -> Iterator[Step]:
        """Train until the schedule ends; the state is saved now and then, and at the end."""
        saved = last = self._clock()
        batches = self._batches()
        while (done := self._done()) < 1.0:
            loss = self._step(next(batches), done)
            now = self._clock()
            self._state.seconds += now - last
            last = now
            self._state.losses.append((self._state.seconds, loss))
            yield Step(self._done(), loss, self._state.seconds)
            if now - saved > _SAVE_S:
                self.save()
                saved = last = self._clock()
        self.save()

    def save(self) -> None:
        """Write the state; a crash meanwhile leaves the former one."""
        partial = self._path.with_suffix(".partial")
        state: dict[str, Any] = {
            "module": self._module.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "seconds": self._state.seconds,
            "examples": self._state.examples,
            "losses": self._state.losses,
        }
        torch.save(state, partial)
        partial.replace(self._path)

    def _resume(self) -> None:
        state = torch.load(self._path, weights_only=True)
        try:
            self._module.load_state_dict(state["module"])
            self._optimizer.load_state_dict(state["optimizer"])
        except (RuntimeError, ValueError, KeyError) as error:
            raise ConfigError(
                f"{self._path} is the state of another training: remove it, or give another --output"
            ) from error
        self._state = _State(state["seconds"], state["examples"], [tuple(pair) for pair in state["losses"]])

    def _done(self) -> float:
        return max(self._state.seconds / self._schedule.seconds, self.epochs / self._schedule.epochs)

    def _batches(self) -> Iterator[torch.Tensor]:
        """Examples in a new order each epoch."""
        size, count = self._schedule.batch_size, self._task.num_examples
        while True:
            epoch, begun = divmod(self._state.examples, count)
            order = torch.randperm(count, generator=torch.Generator().manual_seed(epoch))
            yield from order[begun:].split(size)

    def _step(self, rows: torch.Tensor, done: float) -> float:
        for group in self._optimizer.param_groups:
            group["lr"] = self._schedule.rate(done)
        with torch.autocast("cpu", torch.bfloat16):
            loss = self._task.loss(rows)
        self._optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self._learning, _CLIP)
        self._optimizer.step()
        self._state.examples += len(rows)
        return float(loss.detach())
