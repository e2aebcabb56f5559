"""One request over all replicas that serve it: what its consumer has had, and how the next one goes on with it."""

from collections.abc import Callable
from dataclasses import replace

from ..cluster.errors import PoisonRequestError, ReplicaLostError
from ..cluster.ids import ReplicaId, RequestId
from ..cluster.messages import GenerateRequest, ReplicaInfo, TokenDelta, WeightsIdentity

MAX_LOSSES = 3


class Journey:
    """A replica that takes over gets the prompt and all that was delivered, as if the output were a part of the prompt:
    draws depend on seed and position alone, and penalties, ``min_tokens`` and ``max_tokens`` count what is output.

    ``clock`` gives monotonic seconds. ``max_losses``: see ``lost``.
    """

    def __init__(self, source: GenerateRequest, clock: Callable[[], float], max_losses: int = MAX_LOSSES) -> None:
        self._source = source
        self._clock = clock
        self._began = clock()
        self._max_losses = max_losses
        self._output = list(source.output_token_ids)
        self._replica: ReplicaId | None = None
        self._stamped = False
        self._has_begun = False
        self._info: ReplicaInfo | None = None
        self._version = ""
        """Of the weights that the latest tokens came from; empty: not told."""
        self.num_moves = 0
        """Replicas that had accepted it and are lost to it."""
        self.num_losses = 0
        """Those among them that did not take leave."""

    @property
    def has_begun(self) -> bool:
        """Whether its consumer has had anything."""
        return self._has_begun

    @property
    def is_suspect(self) -> bool:
        """Whether the next replica that is lost with it is the last: then nobody else may have been the cause."""
        return 0 < self.num_losses == self._max_losses - 1

    def request(self) -> GenerateRequest:
        """For the next replica. Each gets an id of its own: one that is cut off may still be at it."""
        source = self._source
        if not self.num_moves:
            return source
        return replace(
            source,
            request_id=RequestId(f"{source.request_id}~{self.num_moves}"),
            params=replace(source.params, seed=source.seed),
            output_token_ids=list(self._output),
            age=source.age + max(self._clock() - self._began, 1e-3),
            is_suspect=self.is_suspect,
        )

    def taken_by(self, replica: ReplicaId | None) -> None:
        """The next deltas are that replica's."""
        self._replica, self._stamped = replica, False

    def begins_on(self, info: ReplicaInfo) -> None:
        """That replica gives deltas of it."""
        self._info = info

    @property
    def weights(self) -> WeightsIdentity | None:
        """Those that its latest tokens came from; None before any."""
        if self._info is None or not self._has_begun:
            return None
        version, weights_format, kv_format = self._info.weights
        return self._version or version, weights_format, kv_format

    def take(self, delta: TokenDelta) -> TokenDelta | None:
        """A delta as the consumer is to see it, without what was delivered before; None: there is nothing left of it.

        Raises ReplicaLostError when tokens are missing before it.
        """
        self._version = delta.weights_version or self._version
        repeated = len(self._output) - delta.index
        if repeated:
            delta = self._without(delta, repeated)
            if not delta.token_ids and delta.finish_reason is None:
                return None
        self._output += delta.token_ids
        if self.num_moves:
            delta = replace(delta, request_id=self._source.request_id)
        return delta if self._stamped else self._stamp(delta)

    def lost(self, error: ReplicaLostError) -> None:
        """It must go on elsewhere. Raises PoisonRequestError if it was on ``max_losses`` replicas as they died."""
        self.num_moves += 1
        if error.reason == "draining":
            return
        self.num_losses += 1
        if self.num_losses >= self._max_losses:
            raise PoisonRequestError(
                f"the request was running on {self.num_losses} replicas as they were lost, and may be the cause:"
                f" it is not tried on another one (the last: {error})"
            ) from error

    def _without(self, delta: TokenDelta, repeated: int) -> TokenDelta:
        if repeated < 0:
            raise ReplicaLostError(f"{self._replica} has left out {-repeated} tokens", reason="gap")
        logprobs = delta.logprobs
        return replace(
            delta,
            index=len(self._output),
            token_ids=delta.token_ids[repeated:],
            logprobs=None if logprobs is None else logprobs[repeated:],
        )

    def _stamp(self, delta: TokenDelta) -> TokenDelta:
        """The first one of a replica. Only the very first tells of the prompt."""
        self._stamped = True
        if not self._has_begun:
            self._has_begun = True
            return replace(delta, replica=self._replica)
        told = {"replica": self._replica, "weights_version": self._version or None}
        return replace(delta, **told, cached_tokens=None, prompt_logprobs=None, report=None)
