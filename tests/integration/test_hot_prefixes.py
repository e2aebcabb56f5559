"""Hot prefixes with real engines: replicas of a small random model, as Serve starts them but in one process."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import small_tokenizers
import torch
import transformers

from warmroot.actors import replica as module
from warmroot.cluster.config import WarmrootConfig
from warmroot.cluster.ids import BlockHash, ReplicaId, RequestId
from warmroot.cluster.messages import GenerateRequest, TokenDelta
from warmroot.cluster.sampling_params import SamplingParams
from warmroot.kv_store.bus import InMemoryBus
from warmroot.kv_store.hashing import pack_tokens
from warmroot.kv_store.hot_prefixes import HotPrefix
from warmroot.router.dispatch import Dispatcher
from warmroot.router.membership import Membership
from warmroot.router.policy import make_policy
from warmroot.router.warm_up import HotKeeper

from .redis_cluster import until

BLOCK = 16
SYSTEM = torch.randint(1, 250, (5 * BLOCK,), generator=torch.Generator().manual_seed(0)).tolist()


class Replica(module.Replica):
    """Ended by hand."""

    def __del__(self) -> None:
        pass


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer, path = small_tokenizers.byte_level(), tmp_path_factory.mktemp("model")
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=tokenizer.eos_token_id,
    )
    made = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in made.parameters():
        parameter.data.normal_(0.0, 0.25)
    made.save_pretrained(path)
    (path / "tokenizer.json").write_text(tokenizer.to_dict()["tokenizer"])
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer.special_tokens))
    return path


class Cluster:
    """An ingress without HTTP, and replicas by name."""

    def __init__(self, bus: InMemoryBus, start: Callable[[str], Awaitable[Replica]]) -> None:
        self.bus = bus
        self.start = start
        self.membership = Membership(bus, "token")
        self.dispatcher = Dispatcher(self.membership, make_policy("warm_prefix"))
        self.keeper = HotKeeper(bus, self.dispatcher, "router")
        self._sent = 0

    async def ask(self, number: int) -> tuple[str | None, int | None, list[int]]:
        """Replica, tokens found cached and output of a prompt behind the system prompt."""
        self._sent += 1
        request = GenerateRequest(
            request_id=RequestId(f"r{self._sent}"),
            prompt_token_ids=[*SYSTEM, *range(number, number + 20)],
            params=SamplingParams(max_tokens=4, temperature=0.0, seed=0, ignore_eos=True),
        )
        deltas: list[TokenDelta] = [delta async for delta in self.dispatcher.generate(request)]
        return deltas[0].replica, deltas[0].cached_tokens, [token for delta in deltas for token in delta.token_ids]

    def held(self, namespace: bytes) -> dict[ReplicaId, int]:
        """Tokens of the system prompt that the index knows of."""
        return self.membership.index.match(BlockHash(namespace), pack_tokens(SYSTEM), BLOCK)

    async def knows(self, *names: str) -> None:
        await until(lambda: sorted(one.info.replica for one in self.membership.ready()) == sorted(names))


@pytest.fixture
async def cluster(model: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    bus = InMemoryBus(time.monotonic, "bus")
    config = WarmrootConfig.of(str(model), num_kv_blocks=64, max_num_seqs=4, quantization="none", dtype="float32")
    monkeypatch.setattr(module, "open_bus", lambda config: bus)
    node = SimpleNamespace(get_node_id=lambda: "node")
    monkeypatch.setattr(module, "ray", SimpleNamespace(get_runtime_context=lambda: node))
    async with AsyncExitStack() as exits:

        async def start(name: str) -> Replica:
            context = SimpleNamespace(replica_id=SimpleNamespace(unique_id=name))
            monkeypatch.setattr(module, "serve", SimpleNamespace(get_replica_context=lambda: context))
            replica = Replica.__new__(Replica)
            await Replica.__init__(replica, config, "token", "127.0.0.1")
            exits.push_async_callback(replica._exits.aclose)
            return replica

        made = Cluster(bus, start)
        await made.membership.start()
        exits.push_async_callback(made.membership.close)
        yield made


async def test_a_hot_prefix_moves_on_to_new_replicas_and_is_copied(cluster: Cluster):
    first = await cluster.start("a")
    namespace = first.info.kv_namespace
    await cluster.knows("a")
    answers = [await cluster.ask(number) for number in range(8)]
    assert [cached for _, cached, _ in answers[1:]] == [len(SYSTEM)] * 7
    await cluster.keeper.once()
    (prefix, *_) = await cluster.bus.hot(9)
    assert prefix.tokens == pack_tokens(SYSTEM)
    assert 0 < prefix.heat <= 7 * len(SYSTEM) / 10.0  # seven found it, in ten seconds or more
    assert cluster.dispatcher.routing().warm_ups == 0

    # A new replica has it before any router can know of the replica.
    await cluster.start("b")
    await cluster.knows("a", "b")
    await until(lambda: cluster.held(namespace) == {"a": len(SYSTEM), "b": len(SYSTEM)})
    assert cluster.dispatcher.routing().warm_ups == 0
    await first._exits.aclose()
    await cluster.knows("b")
    assert await cluster.ask(3) == ("b", len(SYSTEM), answers[3][2])

    # One that came when nothing was hot gets a copy when it is needed.
    await cluster.bus.put_hot("router", [], 60.0)
    await cluster.start("c")
    await cluster.knows("b", "c")
    assert "c" not in cluster.held(namespace)
    hot = HotPrefix(BlockHash(namespace), BLOCK, pack_tokens(SYSTEM), heat=100.0, load=1.0)
    await cluster.bus.put_hot("another router", [hot], 60.0)
    await cluster.keeper.once()
    await until(lambda: cluster.held(namespace) == {"b": len(SYSTEM), "c": len(SYSTEM)})
    assert cluster.dispatcher.routing().warm_ups == 1
    await asyncio.sleep(0)
    assert cluster.dispatcher.core.in_flight.unfinished(ReplicaId("c")) == 0
