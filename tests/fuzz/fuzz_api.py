"""The API over a real engine with a real, tiny model, on an event loop of its own; and what its answers must be."""

import asyncio
import json
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np
from fuzz_files import llama_gguf
from fuzz_formats import as_gguf
from openai_harness import FakeCluster, events

from warmroot.actors.engine.config import EngineConfig
from warmroot.actors.engine.engine import Engine
from warmroot.actors.local_engine import LocalEngine, LocalGenerator
from warmroot.actors.runner.load import KvMemoryConfig, load_runner
from warmroot.cluster.messages import GenerateRequest, Load, TokenDelta
from warmroot.kv_store.hashing import namespace_root
from warmroot.router import wire
from warmroot.router.frontend import Frontend
from warmroot.router.openai.app import build_app
from warmroot.router.openai.settings import ApiSettings
from warmroot.router.tokenizer import Tokenizer

CONTEXT = 256
HANGS_S = 60.0
"""An answer takes milliseconds."""
T = TypeVar("T")


def write_tiny_model(path: Path) -> Path:
    """A Llama of one layer whose tokens are bytes, with weights drawn from a seed."""
    tree = llama_gguf()
    tree["metadata"]["llama.context_length"] = CONTEXT
    data = as_gguf({**tree, "data": 0})
    weights = np.random.default_rng(0).normal(0, 0.2, tree["data"] // 4).astype("<f4")
    path.write_bytes(data + weights.tobytes())
    return path


class OverTheWire:
    """A generator whose requests and deltas travel as they do between an ingress and a replica."""

    def __init__(self, inner: LocalGenerator) -> None:
        self._inner = inner

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        submitted = wire.decode(wire.encode(wire.Submit(request))[4:])
        assert isinstance(submitted, wire.Submit)
        async with aclosing(self._inner.generate(submitted.request)) as deltas:
            async for delta in deltas:
                sent = wire.decode(wire.encode(wire.Deltas([delta], Load()))[4:])
                assert isinstance(sent, wire.Deltas)
                yield sent.deltas[0]


class TinyApi:
    """``post`` from any thread. Close it."""

    def __init__(self, **settings: Any) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        with tempfile.TemporaryDirectory() as folder:
            path = write_tiny_model(Path(folder) / "tiny.gguf")
            self.tokenizer = Tokenizer.from_path(path)
            kv = KvMemoryConfig(block_size=4, num_kv_blocks=300)
            runner = load_runner(path, dtype="float32", kv=kv, max_num_seqs=16, open_tokenizer=lambda: self.tokenizer)
        config = EngineConfig(
            max_model_len=CONTEXT,
            max_num_seqs=16,
            max_num_batched_tokens=128,
            vocab_size=self.tokenizer.vocab_size,
            eos_token_ids=(256,),
        )
        engine = Engine(runner, config, time.monotonic, namespace_root("tiny"))
        self.generator = LocalGenerator(lambda sink: LocalEngine(engine, runner, sink), self.loop)
        frontend = Frontend(OverTheWire(self.generator), self.tokenizer, model="org/tiny", max_model_len=CONTEXT)
        self.app = build_app({"tiny": frontend}, ApiSettings.model_validate(settings), FakeCluster())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Raises TimeoutError where the answer does not come."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(HANGS_S)

    def post(self, path: str, body: bytes) -> httpx.Response:
        """The answer, and the engine idle with all its blocks free."""
        answer = self.run(self._post(path, body))
        self.check_idle()
        return answer

    async def _post(self, path: str, body: bytes) -> httpx.Response:
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=True)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post(path, content=body, headers={"content-type": "application/json"})

    def check_idle(self) -> None:
        """Raises AssertionError where a sequence or a block is still held."""
        end = time.monotonic() + HANGS_S
        while (load := self.generator.engine.load()).running or load.waiting or load.kv_used_blocks:
            assert time.monotonic() < end, f"the engine is not idle: {load}"
            time.sleep(0.0005)
        assert self.generator.engine.healthy

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.generator.close()
        self.loop.close()


def check_answer(answer: httpx.Response, body: Any) -> None:
    """Whole and consistent, or an error that says what was wrong. ``body`` is what was asked, as far as it is JSON."""
    if answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream"):
        return _check_stream(events(answer.text.replace(": keep-alive\n\n", "")), body)
    if answer.status_code == 200:
        return _check_whole(answer.json(), body)
    in_time = answer.status_code == 504 and isinstance(body, dict) and bool({"timeout", "deadline"} & body.keys())
    assert in_time or 400 <= answer.status_code < 500, (answer.status_code, answer.text)
    error = answer.json()["error"]
    assert error["message"] and isinstance(error["message"], str) and len(error["message"]) < 2000, error
    assert set(error) == {"message", "type", "param", "code"}
    if error["param"] is not None and isinstance(body, dict) and "is missing" not in error["message"].lower():
        root = error["param"].split(".")[0]
        known = {*body, "model", "messages", "prompt", "max_tokens"}
        assert root in known, f"{error} names no field of the request"


def _check_whole(answer: dict[str, Any], body: dict[str, Any]) -> None:
    usage, choices = answer["usage"], answer["choices"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert 0 <= usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"]
    n, num_prompts = body.get("n") or 1, _num_prompts(body)
    assert [choice["index"] for choice in choices] == list(range(n * num_prompts))
    for choice in choices:
        assert choice["finish_reason"] in {"stop", "length"}
        _check_logprobs(choice, body)
        if body.get("return_token_ids") and body.get("max_tokens") is not None and "messages" not in body:
            assert len(choice["token_ids"]) <= body["max_tokens"]
    if body.get("return_token_ids") and not body.get("best_of"):
        assert usage["completion_tokens"] == sum(len(choice["token_ids"]) for choice in choices)


def _check_logprobs(choice: dict[str, Any], body: dict[str, Any]) -> None:
    logprobs = choice["logprobs"]
    wanted = bool(body.get("logprobs")) if "messages" in body else body.get("logprobs") is not None
    assert (logprobs is not None) == wanted, (logprobs, body)
    if logprobs is None:
        return
    if "messages" in body:
        entries = logprobs["content"]
        assert all(entry["logprob"] <= 0 for entry in entries)
        assert all(len(entry["top_logprobs"]) == (body.get("top_logprobs") or 0) for entry in entries)
        num_tokens = len(entries)
    else:
        lengths = {len(logprobs[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
        assert len(lengths) == 1, logprobs
        num_tokens = lengths.pop()
    if body.get("return_token_ids") and not body.get("echo"):
        assert num_tokens == len(choice["token_ids"])


def _check_stream(found: list[Any], body: dict[str, Any]) -> None:
    assert found[-1] == "[DONE]"
    chunks = found[:-1]
    assert not any("error" in chunk for chunk in chunks), chunks
    ends = [choice["index"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"] is not None]
    assert sorted(ends) == list(range((body.get("n") or 1) * _num_prompts(body))), "each choice ends once"
    options = body.get("stream_options") or {}
    reported = [chunk["usage"] for chunk in chunks if chunk.get("usage") is not None]
    assert bool(reported) == bool(options.get("include_usage")), reported
    for usage in reported:
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def _num_prompts(body: dict[str, Any]) -> int:
    prompt = body.get("prompt")
    return len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1


def parsed(data: bytes) -> Any:
    """The last of equal keys counts, as for the server."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None
