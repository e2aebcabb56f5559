"""Tensors on their way to the replicas of a model: in Ray's object store, named, until the last bucket is there."""

import uuid
from collections.abc import Callable, Mapping
from typing import Any, cast

import ray
import torch
from ray.actor import ActorHandle

from ..actors.new_weights import NAMESPACE, to_shared
from ..cluster.errors import InvalidRequestError
from ..cluster.weights_update import NewWeights, UpdateMode, WeightsReport

Update = Callable[..., WeightsReport]


class Shelf:
    """Runs in an actor: what replicas ask for tensors. It knows where they lie and never holds them.

    With ``origin``, an actor with the same two methods, it only passes questions on.
    """

    def __init__(self, origin: Any = None) -> None:
        self._origin = origin
        self._described: dict[str, tuple[tuple[int, ...], str]] = {}
        self._places: dict[str, list[Any]] = {}

    async def put(self, described: dict[str, tuple[tuple[int, ...], str]], places: dict[str, list[Any]]) -> None:
        """Tensors' shapes and dtypes, and references to them, each in a list of its own."""
        self._described.update(described)
        self._places.update(places)

    async def tensors(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of each."""
        return self._described if self._origin is None else await self._origin.tensors.remote()

    async def tensor(self, name: str) -> list[Any]:
        """Where it lies."""
        return self._places[name] if self._origin is None else [self._origin.tensor.remote(name)]


class WeightsBuckets:
    """New weights of a model, put in bucket by bucket; ``commit`` gives them to all replicas, ``drop`` to none.

    The object store holds one copy of them on each node until then. Also a context manager, which drops what was not
    committed.
    """

    def __init__(self, update: Update, version: str | None, origin: Any = None) -> None:
        """``Handle.new_weights`` makes them. ``origin``: an actor that has them all, so that none need be put in."""
        self.version = version or f"tensors-{uuid.uuid4().hex[:12]}"
        self._update = update
        self._name = f"weights-{uuid.uuid4().hex}"
        self._shelf: Any = start_shelf(self._name, origin)

    def add(self, bucket: Mapping[str, torch.Tensor]) -> None:
        """Put in tensors by their Hugging Face names; whole, even where ranks hold parts."""
        described = {
            name: (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in bucket.items()
        }
        places = {name: [ray.put(to_shared(tensor))] for name, tensor in bucket.items()}
        ray.get(self._shelf.put.remote(described, places))

    def commit(self, *, mode: UpdateMode = "wait", one_by_one: bool = False, timeout_s: float = 600.0) -> WeightsReport:
        """All are there: replicas load them and change. See ``Handle.update_weights``."""
        new = NewWeights(version=self.version, actor=f"{NAMESPACE}/{self._name}")
        try:
            return self._update(new, mode=mode, one_by_one=one_by_one, timeout_s=timeout_s)
        finally:
            self.drop()

    def drop(self) -> None:
        """Let go of the tensors. Idempotent."""
        shelf, self._shelf = self._shelf, None
        if shelf is not None:
            ray.kill(shelf)

    def __enter__(self) -> "WeightsBuckets":
        return self

    def __exit__(self, *_: object) -> None:
        self.drop()


def start_shelf(name: str, origin: Any = None) -> Any:
    """The actor, which ends with this process."""
    remote = cast(Any, ray.remote(Shelf))
    return remote.options(name=name, namespace=NAMESPACE, num_cpus=0, max_concurrency=100).remote(origin)


def check_source(source: object) -> None:
    """Raise InvalidRequestError for what no weights can come from."""
    if not isinstance(source, (str, Mapping, ActorHandle)):
        raise InvalidRequestError(
            f"new weights come from a checkpoint's name, tensors by name, or a Ray actor, not {type(source).__name__}",
            param="weights",
        )
