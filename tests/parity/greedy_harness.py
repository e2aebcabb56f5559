"""Greedy generation by an engine over a real decoder, and by transformers."""

import time
from dataclasses import dataclass, field

import torch

from warmroot.actors.engine.config import EngineConfig
from warmroot.actors.engine.engine import Engine
from warmroot.actors.engine.plan import StepPlan
from warmroot.actors.models.decoder import Decoder
from warmroot.actors.runner.load_drafter import drafter_of
from warmroot.actors.runner.runner import ModelRunner
from warmroot.cluster.ids import RequestId
from warmroot.cluster.kv_layout import KvLayout
from warmroot.cluster.messages import GenerateRequest
from warmroot.cluster.sampling_params import SamplingParams
from warmroot.kv_store.hashing import namespace_root


class RecordingRunner(ModelRunner):
    """Remembers its plans."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.plans: list[StepPlan] = []

    def submit(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        super().submit(plan)

    @property
    def num_restarts(self) -> int:
        """How often a sequence came back after preemption."""
        ids = [new.request_id for plan in self.plans for new in plan.new]
        return len(ids) - len(set(ids))


@dataclass
class GreedyEngine:
    """``generate`` may be called again and again: the cache stays."""

    decoder: Decoder
    block_size: int = 4
    num_blocks: int = 400
    options: dict = field(default_factory=dict)
    draft: Decoder | None = None
    """What drafts for ``speculation`` among the options."""

    def __post_init__(self) -> None:
        layout = KvLayout.of(self.decoder.spec.layer_windows, self.block_size)
        speculation, make_drafter = self.options.get("speculation"), None
        if speculation is not None:
            make_drafter = drafter_of(
                speculation, self.decoder, layout, self.num_blocks, self.decoder.dtype, self.draft
            )
        self.runner = RecordingRunner(self.decoder, layout, self.num_blocks, make_drafter=make_drafter)
        config = EngineConfig(
            max_model_len=self.decoder.spec.max_position,
            eos_token_ids=self.decoder.spec.eos_token_ids,
            vocab_size=self.decoder.spec.vocab_size,
            **self.options,
        )
        self.engine = Engine(self.runner, config, time.monotonic, namespace_root("parity"))
        self.cached_tokens: dict[str, int] = {}
        self._num_calls = 0

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        self._num_calls += 1
        outputs: dict[str, list[int]] = {}
        for index, prompt in enumerate(prompts):
            request_id = RequestId(f"{self._num_calls}-{index}")
            outputs[request_id] = []
            params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
            self.engine.add(GenerateRequest(request_id=request_id, prompt_token_ids=prompt, params=params))
        while self.engine.has_work:
            for delta in self.engine.step():
                assert delta.error is None, delta.error
                assert delta.index == len(outputs[delta.request_id])
                outputs[delta.request_id] += delta.token_ids
                if delta.cached_tokens is not None:
                    self.cached_tokens[delta.request_id] = delta.cached_tokens
        assert self.engine.load().kv_used_blocks == 0
        return list(outputs.values())


@torch.no_grad()
def reference_greedy(
    model, prompts: list[list[int]], max_tokens: int, eos_token_ids=(), *, batched: bool = False
) -> list[list[int]]:
    """transformers' ``generate``, prompt by prompt, or all at once with padding on the left."""
    outputs: list[list[int]] = []
    for batch in [prompts] if batched else [[prompt] for prompt in prompts]:
        width = max(map(len, batch))
        tokens = model.generate(
            torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in batch]),
            attention_mask=torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch]),
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=list(eos_token_ids) or None,
            pad_token_id=0,
        )
        outputs += [_until_end(row[width:].tolist(), eos_token_ids) for row in tokens]
    return outputs


def _until_end(tokens: list[int], eos_token_ids) -> list[int]:
    ends = [index + 1 for index, token in enumerate(tokens) if token in eos_token_ids]
    return tokens[: ends[0]] if ends else tokens


@torch.no_grad()
def explain_difference(model, prompt: list[int], expected: list[int], found: list[int]) -> str:
    """Where two outputs part, and how far apart the reference's logits of both tokens are: a near tie, or a fault."""
    at = next((i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b), None)
    if at is None:
        return f"{len(found)} tokens instead of {len(expected)}"
    logits = model(torch.tensor([prompt + expected[:at]])).logits[0, -1]
    gap = float(logits[expected[at]] - logits[found[at]])
    return f"token {at} is {found[at]} instead of {expected[at]}; the reference's logit gap is {gap:.6f}"
