"""A way into a running cluster, for an ingress or for any process in Ray: the frontend over a dispatcher."""

import asyncio
import random
import uuid
from collections.abc import Mapping
from math import inf
from pathlib import Path

from ..cluster.errors import ReplicaUnavailableError
from ..cluster.messages import ModelCard
from ..cluster.overload import OverloadConfig
from ..cluster.time_limits import TimeLimits
from ..kv_store.bus import ClusterBus
from ..router.admission import QueueLimits
from ..router.channel_tls import ChannelTls
from ..router.dispatch import Dispatcher
from ..router.frontend import Frontend
from ..router.late_binding import LateBinding
from ..router.membership import Membership
from ..router.peer_exchange import PeerExchange
from ..router.policy import make_policy
from ..router.tokenizer import Tokenizer
from ..router.trace_recorder import TraceRecorder
from ..router.warm_up import HotKeeper
from ..router.weights_updater import WeightsUpdater
from .scaling_desk import DemandTeller

CARD_POLL_S = 0.1


class ClusterClient:
    """Frontend, dispatcher and membership of this process, all on the event loop that made them."""

    def __init__(
        self,
        bus: ClusterBus,
        card: ModelCard,
        membership: Membership,
        dispatcher: Dispatcher,
        frontend: Frontend,
        recorder: TraceRecorder | None = None,
    ) -> None:
        self._bus = bus
        self._recorder = recorder
        name = uuid.uuid4().hex
        self._exchange = PeerExchange(bus, dispatcher.core.peers, name)
        self._keeper = HotKeeper(bus, dispatcher, name)
        self._teller = DemandTeller(card.model, dispatcher, dispatcher.overview.scaled)
        self.card = card
        self.membership = membership
        self.dispatcher = dispatcher
        self.frontend = frontend
        self.updater = WeightsUpdater(membership.leased)

    @classmethod
    async def connect(
        cls,
        bus: ClusterBus,
        model: str | None = None,
        *,
        token: str | None = None,
        build: str | None = None,
        timeout_s: float = 3600.0,
        record_trace: str | None = None,
        card: ModelCard | None = None,
        channel_tls: Mapping[str, str] | None = None,
    ) -> "ClusterClient":
        """Wait for the first replica to announce the model, then follow the bus.

        With ``token``, words of an earlier run of the cluster, which had another, are passed over; with ``build`` those
        of an application that is being replaced; with ``card`` nobody is waited for. ``channel_tls``: see
        ``TlsConfig.channel``; None: as the model's card says.
        Raises ReplicaUnavailableError when none has announced it within ``timeout_s``.
        """
        card = card or await _card(bus, model, token, build, timeout_s)
        limits = TimeLimits(**card.limits)
        tls = ChannelTls.of(card.channel_tls if channel_tls is None else channel_tls)
        membership = Membership(bus, card.token, model=card.model, limits=limits, tls=tls)
        queue = queue_limits(card)
        late = LateBinding(backlog_s=card.late_binding_backlog, needs_slot=queue.max_wait_s < inf)
        dispatcher = Dispatcher(
            membership,
            make_policy(card.routing_policy),
            late=late,
            queue=queue,
            wait_s=limits.no_replica_timeout,
            max_losses=card.max_replica_losses,
        )
        tokenizer = Tokenizer.from_dict(card.tokenizer)
        draws = random.SystemRandom() if card.seed is None else random.Random(card.seed)
        recorder = None if record_trace is None else TraceRecorder(dispatcher, Path(record_trace))
        frontend = Frontend(
            recorder or dispatcher,
            tokenizer,
            model=card.model,
            max_model_len=card.max_model_len,
            vocab_size=card.vocab_size,
            new_seed=lambda: draws.getrandbits(63),
            timeout_s=limits.request_timeout or None,
            tool_call_parser=card.tool_call_parser,
        )
        client = cls(bus, card, membership, dispatcher, frontend, recorder)
        await membership.start()
        client._exchange.start()
        client._keeper.start()
        client._teller.start()
        return client

    async def close(self) -> None:
        """Disconnect from replicas and bus; what waits to be recorded is written."""
        self._exchange.close()
        self._keeper.close()
        self._teller.close()
        await self.membership.close()
        await self._bus.close()
        if self._recorder is not None:
            await asyncio.to_thread(self._recorder.close)


def queue_limits(card: ModelCard) -> QueueLimits:
    """How much may wait in a router of that model."""
    overload, limits = OverloadConfig.model_validate(card.overload), TimeLimits(**card.limits)
    return QueueLimits(
        max_wait_s=overload.max_queue_wait or inf,
        max_tokens=overload.max_num_queued_tokens or inf,
        max_requests=card.max_num_queued_reqs,
        timeout_s=limits.queue_timeout or inf,
    )


async def _card(
    bus: ClusterBus, model: str | None, token: str | None, build: str | None, timeout_s: float
) -> ModelCard:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    reason = ""
    while loop.time() <= deadline:
        try:
            card = await bus.card(model)
        except ConnectionError as error:
            card, reason = None, f": {error}"
        if card is not None and token in (None, card.token) and build in (None, card.build):
            return card
        await asyncio.sleep(CARD_POLL_S)
    raise ReplicaUnavailableError(f"no replica of {model or 'a single model'} came up in {timeout_s:g} s{reason}")
