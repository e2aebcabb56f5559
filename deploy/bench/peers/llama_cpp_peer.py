"""llama.cpp through the batch API of llama-cpp-python, scheduled as llama.cpp's own server does.

Each step is one batch: a token of every running sequence, then prompt tokens up to ``n_batch``.
"""

import ctypes
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import llama_cpp  # pyright: ignore[reportMissingImports]
import numpy

from .protocol import Job, News, serve

_BATCH_TOKENS = 2048


@dataclass(slots=True)
class _Sequence:
    """A request in a slot. ``last`` is the token to decode next, once the prompt is done."""

    index: int
    job: Job
    num_computed: int = 0
    num_output: int = 0
    last: int = 0


class LlamaCppBackend:
    """``model`` is a GGUF file, ``dtype`` what it holds."""

    def __init__(self, settings: dict[str, Any]) -> None:
        llama_cpp.llama_backend_init()
        self._log = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._log, ctypes.c_void_p(0))
        path, began = settings["model"], time.monotonic()
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        self._context = llama_cpp.llama_init_from_model(self._model, _context_params(settings))
        if not self._context:
            raise RuntimeError("llama.cpp cannot make a context: is max_num_seqs above its limit?")
        load_s = time.monotonic() - began
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._sampler = llama_cpp.llama_sampler_init_greedy()
        self._batch = llama_cpp.llama_batch_init(_BATCH_TOKENS, 0, 1)
        self._free = list(range(settings["max_num_seqs"]))
        self._running: dict[int, _Sequence] = {}
        self._waiting: list[_Sequence] = []
        self.facts = {
            "version": llama_cpp.__version__,
            "system": llama_cpp.llama_print_system_info().decode(),
            "dtype": settings["dtype"],
            "threads": settings["threads"],
            "load_s": load_s,
            "driver": "llama_decode, continuous batches",
        }

    def select(self, variant: str) -> None:
        """There is one."""

    def reset(self) -> None:
        """Forget all sequences."""
        llama_cpp.llama_memory_clear(self._memory, False)

    def add(self, index: int, job: Job) -> None:
        """Queue a request."""
        self._waiting.append(_Sequence(index, job))

    def step(self) -> Iterable[News]:
        """One batch."""
        while self._free and self._waiting:
            self._running[self._free.pop()] = self._waiting.pop(0)
        outputs = self._fill()
        if llama_cpp.llama_decode(self._context, self._batch):
            raise RuntimeError("llama_decode failed: the context is too small")
        return [self._sample(slot, position) for slot, position in outputs]

    def score(self, prompt: list[int]) -> dict[str, Any]:
        """Of each token but the first, after those before it: see ``quality.Scores``. Up to 2,048 tokens."""
        self.reset()
        self._batch.n_tokens = 0
        self._put(0, prompt, 0, last=True)
        for row in range(len(prompt)):
            self._batch.logits[row] = True
        if llama_cpp.llama_decode(self._context, self._batch):
            raise RuntimeError("llama_decode failed: the context is too small")
        size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        rows = numpy.ctypeslib.as_array(llama_cpp.llama_get_logits(self._context), (len(prompt), size))
        logits = rows[:-1].astype(numpy.float64)
        logits -= numpy.logaddexp.reduce(logits, axis=1, keepdims=True)
        best = numpy.partition(logits, -2, axis=1)[:, -2:]
        self.reset()
        return {
            "logprobs": logits[numpy.arange(len(logits)), prompt[1:]].tolist(),
            "argmax": logits.argmax(1).tolist(),
            "margins": (best[:, 1] - best[:, 0]).tolist(),
        }

    def _fill(self) -> list[tuple[int, int]]:
        """Fill the batch; (slot, position in the batch) of each sequence that gets a token."""
        self._batch.n_tokens = 0
        outputs: list[tuple[int, int]] = []
        for slot, sequence in self._running.items():
            if sequence.num_output:
                self._put(slot, [sequence.last], sequence.num_computed, last=True)
                sequence.num_computed += 1
                outputs.append((slot, self._batch.n_tokens - 1))
        for slot, sequence in self._running.items():
            room = _BATCH_TOKENS - self._batch.n_tokens
            chunk = sequence.job.prompt[sequence.num_computed : sequence.num_computed + room]
            if sequence.num_output or not chunk:
                continue
            done = sequence.num_computed + len(chunk) == len(sequence.job.prompt)
            self._put(slot, chunk, sequence.num_computed, last=done)
            sequence.num_computed += len(chunk)
            if done:
                outputs.append((slot, self._batch.n_tokens - 1))
        return outputs

    def _put(self, slot: int, tokens: list[int], position: int, *, last: bool) -> None:
        batch = self._batch
        for offset, token in enumerate(tokens):
            row = batch.n_tokens + offset
            batch.token[row] = token
            batch.pos[row] = position + offset
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = slot
            batch.logits[row] = False
        batch.n_tokens += len(tokens)
        batch.logits[batch.n_tokens - 1] = last

    def _sample(self, slot: int, position: int) -> News:
        sequence = self._running[slot]
        sequence.last = llama_cpp.llama_sampler_sample(self._sampler, self._context, position)
        sequence.num_output += 1
        if sequence.num_output == sequence.job.max_tokens:
            llama_cpp.llama_memory_seq_rm(self._memory, slot, -1, -1)
            del self._running[slot]
            self._free.append(slot)
        return News(sequence.index, 1)


def _context_params(settings: dict[str, Any]) -> Any:
    params = llama_cpp.llama_context_default_params()
    params.n_seq_max = settings["max_num_seqs"]
    params.n_ctx = settings["max_model_len"] * settings["max_num_seqs"]
    params.n_batch = _BATCH_TOKENS
    params.n_threads = params.n_threads_batch = settings["threads"]
    params.kv_unified = settings["kv_unified"]
    return params


if __name__ == "__main__":
    serve(LlamaCppBackend)
