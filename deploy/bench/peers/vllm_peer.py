"""vLLM on a CPU, driven step by step through its engine class."""

import os
from collections.abc import Iterable
from typing import Any

from .protocol import Job, News, serve


class VllmBackend:
    """``dtype``, ``compiled`` and ``prefix_caching`` come from the settings; lengths and batch sizes as well."""

    def __init__(self, settings: dict[str, Any]) -> None:
        threads = settings["threads"]
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, range(threads))))
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        # The engine in this process: no second process competes for the cores.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        import torch
        import vllm  # pyright: ignore[reportMissingImports]

        self._sampling_params = vllm.SamplingParams
        self._engine = vllm.LLMEngine.from_engine_args(
            vllm.EngineArgs(
                model=settings["model_dir"],
                skip_tokenizer_init=True,
                dtype={"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[settings["dtype"]],
                max_model_len=settings["max_model_len"],
                max_num_seqs=settings["max_num_seqs"],
                enable_prefix_caching=settings["prefix_caching"],
                enforce_eager=not settings["compiled"],
                disable_log_stats=True,
            )
        )
        self._num_output: dict[str, int] = {}
        self.facts = {
            "version": vllm.__version__,
            "torch": torch.__version__,
            "dtype": settings["dtype"],
            "threads": threads,
            "compiled": settings["compiled"],
            "prefix_caching": settings["prefix_caching"],
        }

    def select(self, variant: str) -> None:
        """There is one."""

    def reset(self) -> None:
        """Forget cached prefixes."""
        self._engine.reset_prefix_cache()

    def add(self, index: int, job: Job) -> None:
        """Queue a request."""
        params = self._sampling_params(temperature=0.0, max_tokens=job.max_tokens, ignore_eos=True, detokenize=False)
        self._num_output[str(index)] = 0
        self._engine.add_request(str(index), {"prompt_token_ids": job.prompt}, params)

    def step(self) -> Iterable[News]:
        """One engine step."""
        news: list[News] = []
        for output in self._engine.step():
            before = self._num_output[output.request_id]
            total = len(output.outputs[0].token_ids)
            self._num_output[output.request_id] = total
            news.append(News(int(output.request_id), total - before, None if before else output.num_cached_tokens))
        return news


if __name__ == "__main__":
    serve(VllmBackend)
