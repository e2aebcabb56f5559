"""The whole API over a scripted generator and a tokenizer whose ids are bytes: for tests of ``router.openai``."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI
from scripted_generator import Script, ScriptedGenerator
from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from warmroot.cluster.engine_counts import EngineCounts
from warmroot.cluster.ids import Epoch, ReplicaId
from warmroot.cluster.messages import GenerateRequest, Load, ReplicaInfo
from warmroot.cluster.scaling_status import ScalingStatus
from warmroot.cluster.weights_update import NewWeights, ReplicaWeights, WeightsReport
from warmroot.router.byte_alphabet import BYTE_TO_CHAR
from warmroot.router.frontend import Frontend
from warmroot.router.openai.app import build_app
from warmroot.router.openai.cluster_state import (
    OwnedPrefix,
    ReplicaState,
    ReplicaStatus,
    RouterStatus,
    RoutingChoice,
    RoutingStats,
    ScalingStep,
    StoreStatus,
)
from warmroot.router.openai.settings import ApiSettings
from warmroot.router.tokenizer import Tokenizer
from warmroot.router.tokenizer_parts import TokenizerParts
from warmroot.router.tracing import Tracing

END = 256
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ '' if loop.last else '\\n' }}{% endfor %}"
    "{{ '\\n<assistant>' if add_generation_prompt else '' }}"
)


def byte_tokenizer() -> Tokenizer:
    """Token 0 to 255 is that byte, 256 ends a text."""
    backend = Backend(BPE(vocab={BYTE_TO_CHAR[byte]: byte for byte in range(256)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<end>", special=True)])
    return Tokenizer(TokenizerParts(backend, {"eos_token": "<end>"}, TEMPLATE))


def says(text: str, *, size: int = 1, **options: Any) -> Script:
    """A script whose deltas are ``size`` bytes of ``text`` each, and an end token."""
    data = list(text.encode())
    return Script([data[start : start + size] for start in range(0, len(data), size)] + [[END]], **options)


@dataclass
class FakeCluster:
    """One replica."""

    state: ReplicaState = ReplicaState.READY
    load: Load = field(
        default_factory=lambda: Load(
            running=3,
            waiting=2,
            kv_used_blocks=25,
            kv_total_blocks=100,
            num_drafts=5,
            num_draft_tokens=19,
            accepted_by_place=(4, 3),
        )
    )
    counts: EngineCounts = field(default_factory=EngineCounts)
    stats: RoutingStats = field(default_factory=RoutingStats)
    fault: str = ""
    tree: list[OwnedPrefix] = field(default_factory=list)
    steps: list[ScalingStep] = field(default_factory=list)

    def replicas(self) -> list[ReplicaStatus]:
        info = ReplicaInfo(
            replica=ReplicaId("r0"),
            epoch=Epoch(1),
            model="org/tiny",
            address="127.0.0.1:1",
            kv_namespace=b"",
            block_size=16,
            kv_total_blocks=100,
            max_num_seqs=8,
            max_num_batched_tokens=256,
            max_model_len=512,
            prefill_tokens_per_s=1000.0,
            decode_step_s=0.01,
            kv_format="bf16",
        )
        return [ReplicaStatus(info=info, state=self.state, load=self.load, counts=self.counts)]

    def routing(self) -> RoutingStats:
        return self.stats

    def explain(self, request_id: str = "", limit: int = 1) -> list[RoutingChoice]:
        return []

    def store(self) -> StoreStatus:
        return StoreStatus(store="redis://h:6379/0", fault=self.fault, index_blocks=12, gaps=3, skipped=1)

    def routers(self) -> list[RouterStatus]:
        return []

    def prefixes(self, limit: int) -> list[OwnedPrefix]:
        return self.tree[:limit]

    def scaling(self) -> list[ScalingStep]:
        return self.steps

    def autoscalers(self) -> list[ScalingStatus]:
        return []


class FakeUpdater:
    """Notes what it is asked for, and has done it."""

    stage = ""

    def __init__(self) -> None:
        self.asked: list[tuple[NewWeights, dict[str, Any]]] = []

    async def update(self, new: NewWeights, **options: Any) -> WeightsReport:
        self.asked.append((new, options))
        changed = ReplicaWeights(replica="r1", weights_version=new.version or "f00", seconds=0.5)
        return WeightsReport(weights_version=changed.weights_version, load_s=2.0, replicas=(changed,))


class Rig:
    """``app`` and what stands under it. Ids are ``id1``, ``id2``, …, and it is always 1700000000."""

    def __init__(
        self,
        script: Script | Callable[[GenerateRequest], Script] | None = None,
        *,
        max_model_len: int = 512,
        tracing: Tracing | None = None,
        **settings: Any,
    ) -> None:
        self.generator = ScriptedGenerator(script or says("Hello!", cached_tokens=4))
        self.tokenizer = byte_tokenizer()
        self.frontend = Frontend(
            self.generator, self.tokenizer, model="org/tiny", max_model_len=max_model_len, new_seed=lambda: 7
        )
        self.cluster = FakeCluster()
        self.updater = FakeUpdater()
        self.frontends = {"tiny": self.frontend, "alias": self.frontend}
        numbers = iter(range(1, 1_000_000))
        self.app: FastAPI = build_app(
            self.frontends,
            ApiSettings.model_validate(settings),
            self.cluster,
            clock=lambda: 1_700_000_000.5,
            new_id=lambda: f"id{next(numbers)}",
            tracing=tracing,
            updaters={"tiny": self.updater},
        )

    def http(self, **options: Any) -> httpx.AsyncClient:
        """A client that calls the application in this process."""
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://test", **options)

    async def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        async with self.http() as client:
            return await client.post(path, json=body, **options)

    async def chat(self, text: str = "Hi", **fields: Any) -> httpx.Response:
        body = {"model": "tiny", "messages": [{"role": "user", "content": text}], **fields}
        return await self.post("/v1/chat/completions", body)

    async def complete(self, prompt: Any = "Hi", **fields: Any) -> httpx.Response:
        return await self.post("/v1/completions", {"model": "tiny", "prompt": prompt, **fields})

    async def idle(self) -> None:
        """Wait until no sequence is open; a test's timeout ends a wait in vain."""
        while self.generator.live:
            await asyncio.sleep(0.001)

    def listening(self) -> AbstractAsyncContextManager[str]:
        """A real server on a free loopback port; its address."""
        return listening(self.app)


@asynccontextmanager
async def listening(app: Any) -> AsyncIterator[str]:
    """A real server of an ASGI application on a free loopback port; its address."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical", lifespan="off"))
    task = asyncio.create_task(server.serve())
    try:
        while not server.started:
            await asyncio.sleep(0.005)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        await task


def events(text: str) -> list[Any]:
    """The JSON of each event of an SSE body; ``[DONE]`` as it is."""
    blocks = [block for block in text.split("\n\n") if block]
    assert all(block.startswith("data: ") for block in blocks), text
    data = [block.removeprefix("data: ") for block in blocks]
    return [entry if entry == "[DONE]" else json.loads(entry) for entry in data]
