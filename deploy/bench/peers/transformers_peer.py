"""Hugging Face transformers: fp32, static batches with left padding, one greedy token per step."""

import warnings
from collections.abc import Iterable
from typing import Any

import torch
import transformers

from .protocol import Job, News, serve


class TransformersBackend:
    """What waits when a batch ends becomes the next batch; nothing joins a running one."""

    def __init__(self, settings: dict[str, Any]) -> None:
        torch.set_num_threads(settings["threads"])
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        warnings.simplefilter("ignore")
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[settings["dtype"]]
        self._model = transformers.AutoModelForCausalLM.from_pretrained(settings["model_dir"], dtype=dtype).eval()
        self._waiting: list[tuple[int, Job]] = []
        self._batch: list[tuple[int, Job]] = []
        self._num_output = 0
        self._state: dict[str, Any] = {}
        self.facts = {
            "version": transformers.__version__,
            "torch": torch.__version__,
            "dtype": settings["dtype"],
            "threads": torch.get_num_threads(),
            "batching": "static",
        }

    def select(self, variant: str) -> None:
        """There is one."""

    def reset(self) -> None:
        """Nothing outlives a batch."""

    def add(self, index: int, job: Job) -> None:
        """Queue a request for the next batch."""
        self._waiting.append((index, job))

    @torch.inference_mode()
    def step(self) -> Iterable[News]:
        """One forward pass: a prefill of the whole batch, or one token for each of its sequences."""
        if not self._batch:
            self._begin()
        output = self._model(**self._state, use_cache=True, logits_to_keep=1)
        self._num_output += 1
        self._advance(output.logits[:, -1].argmax(-1, keepdim=True), output.past_key_values)
        news = [News(index, 1) for index, job in self._batch if job.max_tokens >= self._num_output]
        if all(job.max_tokens <= self._num_output for _, job in self._batch):
            self._batch = []
        return news

    @torch.inference_mode()
    def score(self, prompt: list[int]) -> dict[str, Any]:
        """Of each token but the first, after those before it: see ``quality.Scores``."""
        logits = self._model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0, :-1].float()
        chosen = logits.log_softmax(1).gather(1, torch.tensor(prompt[1:])[:, None])
        best = logits.topk(2, dim=1)
        return {
            "logprobs": chosen.flatten().tolist(),
            "argmax": best.indices[:, 0].tolist(),
            "margins": (best.values[:, 0] - best.values[:, 1]).tolist(),
        }

    def _begin(self) -> None:
        self._batch, self._waiting = self._waiting, []
        self._num_output = 0
        width = max(len(job.prompt) for _, job in self._batch)
        padding = [width - len(job.prompt) for _, job in self._batch]
        ids = torch.tensor([[0] * pad + job.prompt for pad, (_, job) in zip(padding, self._batch, strict=True)])
        mask = (torch.arange(width) >= torch.tensor(padding)[:, None]).long()
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        self._state = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}

    def _advance(self, tokens: torch.Tensor, cache: Any) -> None:
        mask = self._state["attention_mask"]
        self._state = {
            "input_ids": tokens,
            "attention_mask": torch.cat([mask, mask.new_ones(len(mask), 1)], 1),
            "position_ids": self._state["position_ids"][:, -1:] + 1,
            "past_key_values": cache,
        }


if __name__ == "__main__":
    serve(TransformersBackend)
