"""Sequences of two KV groups that decode, come and go."""

import random

from warmroot.actors.engine.plan import NewSequence, SequenceStep, StepPlan
from warmroot.actors.runner.sequences import SequenceTable
from warmroot.cluster.ids import BlockId, RequestId
from warmroot.cluster.sampling_params import SamplingParams

BLOCK_SIZE = 4


class Sequences:
    """Sequences of two KV groups that grow, come and go."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.table = SequenceTable(2, rows=1, columns=4)
        self.lengths: dict[str, int] = {}
        self.widths: dict[str, int] = {}
        self.num_steps = self.num_added = 0

    def blocks(self, count: int) -> tuple[list[BlockId], ...]:
        return tuple([BlockId(self.random.randrange(1, 900)) for _ in range(count)] for _ in range(2))

    def new(self, length: int) -> NewSequence:
        name = f"s{self.num_added}"
        self.num_added += 1
        self.lengths[name], self.widths[name] = length, -(-length // BLOCK_SIZE)
        return NewSequence(
            request_id=RequestId(name),
            token_ids=[self.random.randrange(1000) for _ in range(length)],
            num_prompt_tokens=length,
            params=SamplingParams(),
            seed=0,
            num_computed=length - 1,
            block_tables=self.blocks(self.widths[name]),
        )

    def step(self, name: str, is_new: bool) -> SequenceStep:
        missing = -(-self.lengths[name] // BLOCK_SIZE) - self.widths[name]
        self.widths[name] += missing
        return SequenceStep(
            request_id=RequestId(name),
            num_computed=self.lengths[name] - 1,
            num_tokens=1,
            samples=True,
            new_blocks=([], []) if is_new else self.blocks(missing),
        )

    def plan(self, dropped: list[str], added: int, skipped: int = 0) -> StepPlan:
        for name in dropped:
            del self.lengths[name]
        old = list(self.lengths)[skipped:]
        new = tuple(self.new(self.random.randrange(1, 30)) for _ in range(added))
        self.num_steps += 1
        return StepPlan(
            step=self.num_steps,
            finished=tuple(map(RequestId, dropped)),
            new=new,
            sequences=tuple(self.step(name, False) for name in old)
            + tuple(self.step(source.request_id, True) for source in new),
        )

    def sampled(self, plan: StepPlan) -> None:
        states = [self.table[step.request_id] for step in plan.sequences]
        self.table.append(states, [self.random.randrange(1000) for _ in states])
        for step in plan.sequences:
            self.lengths[step.request_id] += 1
