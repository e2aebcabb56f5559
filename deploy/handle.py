"""A client of a running cluster for any process in Ray: the ingress's router and sockets, without HTTP."""

from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

import ray

from ..actors.cluster_client import ClusterClient
from ..actors.embedded_bus import find_bus
from ..cluster.errors import ConfigError, ReplicaUnavailableError
from ..cluster.sampling_params import SamplingParams
from ..cluster.weights_update import NewWeights, UpdateMode, WeightsReport
from ..router.openai.cluster_state import ReplicaStatus
from ..router.output import OutputDelta, RequestOutput
from .background_loop import BackgroundLoop
from .local_ray import join_ray

if TYPE_CHECKING:
    import torch

    from .weights_shelf import WeightsBuckets

Prompt = str | Sequence[int] | Sequence[dict[str, Any]]
"""A text, token ids, or chat messages."""


class Handle:
    """Generates on the cluster's replicas. Use ``connect`` to get one; it may be shared by threads and event loops.

    ``generate`` and ``stream`` are for asynchronous code, ``generate_sync`` and ``stream_sync`` for the rest. Closing
    an iterator before its end, or cancelling the caller, aborts the request and frees its memory.
    """

    def __init__(self, loop: BackgroundLoop, client: ClusterClient) -> None:
        self._loop = loop
        self._client = client

    @property
    def model(self) -> str:
        """Name of the served model."""
        return self._client.card.model

    def replicas(self) -> Sequence[ReplicaStatus]:
        """Every replica that this handle knows of, with its state and its latest load."""
        return self._loop.run(self._replicas())

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> RequestOutput:
        """The whole output. ``options``: ``priority`` (lower runs first), ``cache_salt``, ``request_id``."""
        return await self._loop.arun(self._generate(prompt, params, options))

    def generate_sync(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> RequestOutput:
        """``generate`` for synchronous code."""
        return self._loop.run(self._generate(prompt, params, options))

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Any
    ) -> AsyncGenerator[OutputDelta, None]:
        """Deltas as they come."""
        return self._loop.aiterate(self._stream(prompt, params, options))

    def stream_sync(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Any
    ) -> Generator[OutputDelta, None, None]:
        """``stream`` for synchronous code."""
        return self._loop.iterate(self._stream(prompt, params, options))

    def update_weights(
        self,
        source: "str | Mapping[str, torch.Tensor] | Any",
        *,
        version: str | None = None,
        mode: UpdateMode = "wait",
        one_by_one: bool = False,
        timeout_s: float = 600.0,
    ) -> WeightsReport:
        """Give all replicas other weights of the same model, without a restart; returns when all have changed.

        ``source``: a checkpoint's folder, GGUF file or hub id, which every node has; tensors by their Hugging Face
        names; or a Ray actor with ``tensors()``, the shape and dtype of each by name, and ``tensor(name)``, one of
        them, which replicas fetch one by one. ``version`` names the weights: replicas that hold it already do nothing.
        ``mode``: what becomes of running requests: ``wait`` for their end, which may take ``timeout_s`` seconds, while
        new ones wait; ``abort`` them; or let them go on ``in_place``. ``one_by_one``: replicas change in turn.

        Raises InvalidRequestError, ReplicaUnavailableError: no replica has changed; WeightsUpdateError: some have.
        """
        options = {"mode": mode, "one_by_one": one_by_one, "timeout_s": timeout_s}
        if isinstance(source, str):
            return self._update(NewWeights(version=version or "", model=source), **options)
        from .weights_shelf import WeightsBuckets, check_source  # brings torch

        check_source(source)
        if isinstance(source, Mapping):
            with self.new_weights(version) as buckets:
                buckets.add(cast("Mapping[str, torch.Tensor]", source))
                return buckets.commit(**options)
        with WeightsBuckets(self._update, version, origin=source) as buckets:
            return buckets.commit(**options)

    def new_weights(self, version: str | None = None) -> "WeightsBuckets":
        """Other weights, to be put in bucket by bucket: ``add`` tensors as often as needed, then ``commit``."""
        from .weights_shelf import WeightsBuckets

        return WeightsBuckets(self._update, version)

    def close(self) -> None:
        """Disconnect; open requests are aborted."""
        self._loop.run(self._client.close())
        self._loop.close()

    def __enter__(self) -> "Handle":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _update(self, new: NewWeights, **options: Any) -> WeightsReport:
        return self._loop.run(self._update_on_loop(new, options))

    async def _update_on_loop(self, new: NewWeights, options: dict[str, Any]) -> WeightsReport:
        return await self._client.updater.update(new, **options)

    async def _replicas(self) -> Sequence[ReplicaStatus]:
        return self._client.dispatcher.replicas()

    async def _generate(self, prompt: Prompt, params: SamplingParams | None, options: dict[str, Any]) -> RequestOutput:
        token_ids = self._tokens(prompt)
        return await self._client.frontend.generate(token_ids, params or SamplingParams(), **options)

    async def _stream(
        self, prompt: Prompt, params: SamplingParams | None, options: dict[str, Any]
    ) -> AsyncGenerator[OutputDelta, None]:
        source = self._client.frontend.stream(self._tokens(prompt), params or SamplingParams(), **options)
        try:
            async for delta in source:
                yield delta
        finally:
            await source.aclose()

    def _tokens(self, prompt: Prompt) -> list[int]:
        frontend = self._client.frontend
        if isinstance(prompt, str):
            return frontend.tokenize(prompt)
        if prompt and isinstance(prompt[0], dict):
            return frontend.render(cast("Sequence[dict[str, Any]]", prompt))
        return frontend.tokenize(list(cast("Sequence[int]", prompt)))


def connect(model: str | None = None, *, address: str | None = None, timeout_s: float = 60.0) -> Handle:
    """A handle to the cluster of this Ray program, or of the Ray at ``address`` ("auto" finds one on this machine).

    ``model`` chooses among several served models. Raises ConfigError where Warmroot is not running, and
    ReplicaUnavailableError when no replica is ready within ``timeout_s`` seconds.
    """
    if not ray.is_initialized():
        join_ray(address or "auto")
    bus = find_bus()
    if bus is None:
        raise ConfigError("Warmroot is not running in this Ray cluster; start it with warmroot serve or warmroot.run")
    loop = BackgroundLoop()
    try:
        return Handle(loop, loop.run(ClusterClient.connect(bus, model, timeout_s=timeout_s)))
    except ReplicaUnavailableError:
        loop.run(bus.close())
        loop.close()
        raise
