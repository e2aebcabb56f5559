"""How much of a decode step is not the model: schedule, submit, pack, sample and account, and the events."""

import time
from statistics import median
from typing import Any, cast

import torch

from ....actors.engine.engine import Engine
from ....actors.models.decoder import Decoder
from ....actors.runner.runner import ModelRunner

_WARM_UP_STEPS = 8


class DecoderClock:
    """Stands before a decoder and adds up the time that its kernels take."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.decoder, name)

    def forward(self, *arguments: Any) -> torch.Tensor:
        """See ``Decoder.forward``."""
        began = time.perf_counter()
        hidden = self.decoder.forward(*arguments)
        self.seconds += time.perf_counter() - began
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """See ``Decoder.logits``."""
        began = time.perf_counter()
        logits = self.decoder.logits(hidden)
        self.seconds += time.perf_counter() - began
        return logits


def measure_steps(engine: Engine, runner: ModelRunner, num_steps: int) -> dict[str, Any]:
    """Of an engine whose requests all decode, and go on for long enough. Medians over the steps, in seconds."""
    clock = DecoderClock(runner.decoder)
    runner.decoder = cast(Decoder, clock)
    try:
        steps = [_timed(engine, clock) for _ in range(_WARM_UP_STEPS + num_steps)][_WARM_UP_STEPS:]
    finally:
        runner.decoder = clock.decoder
    return {
        "steps": num_steps,
        "step_s": median(step for step, _ in steps),
        "kernels_s": median(kernels for _, kernels in steps),
        "overhead_s": median(step - kernels for step, kernels in steps),
        "overhead_share": median((step - kernels) / step for step, kernels in steps),
    }


def _timed(engine: Engine, clock: DecoderClock) -> tuple[float, float]:
    """Seconds of one whole step, and of the kernels in it."""
    clock.seconds, began = 0.0, time.perf_counter()
    engine.step()
    engine.drain_events()
    return time.perf_counter() - began, clock.seconds
