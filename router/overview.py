"""What operators look at beside counts: how requests fare, the routers that are heard, and the tree of prefixes."""

from collections.abc import Callable, Sequence

from ..cluster.ids import BlockHash
from ..cluster.messages import GenerateRequest
from ..cluster.scaling_status import ScalingStatus
from ..kv_store.hot_prefixes import HotPrefix
from ..kv_store.prefix_tree import prefix_tree
from .core import RoutingCore
from .membership import Membership
from .namespaces import SaltOwners
from .openai.cluster_state import OwnedPrefix, RouterStatus, ScalingStep
from .recent import RecentFigures, Watch


class Overview:
    """Of one router. ``hot`` and ``steps`` are told by those who follow them; ``clock`` gives monotonic seconds."""

    def __init__(self, membership: Membership, core: RoutingCore, clock: Callable[[], float]) -> None:
        self.hot: Sequence[HotPrefix] = ()
        """What all routers' requests share, as it was looked at last."""
        self.steps: Sequence[ScalingStep] = ()
        """What the autoscaler has decided lately, newest first."""
        self.autoscaler: ScalingStatus | None = None
        """What it decides; None: nobody does."""
        self._membership = membership
        self._core = core
        self._recent = RecentFigures(clock)
        self._owners = SaltOwners()
        core.peers.figures = self._recent.figures

    def scaled(self, status: ScalingStatus) -> None:
        """The autoscaler has decided."""
        self.autoscaler = status
        self.steps = [
            ScalingStep(
                at=decision.at,
                model=status.model,
                before=decision.before,
                after=decision.target,
                reason="; ".join(decision.reasons),
            )
            for decision in reversed(status.log)
        ]

    def autoscalers(self) -> list[ScalingStatus]:
        """What is decided, if anybody decides."""
        return [] if self.autoscaler is None else [self.autoscaler]

    def watch(self, request: GenerateRequest) -> Watch:
        """Count a request, which begins now."""
        if request.cache_salt:
            self._owners.note(request.cache_salt, request.tenant)
        return self._recent.watch()

    @property
    def _model(self) -> str:
        """Whose replicas these are; where all are members, the first one's."""
        replicas = self._membership.replicas()
        return self._membership.model or next((replica.info.model for replica in replicas), "")

    def routers(self) -> list[RouterStatus]:
        """The router itself, and the others of its model that are heard."""
        model, peers = self._model, self._core.peers
        own = RouterStatus(
            name=peers.name,
            model=model,
            is_own=True,
            in_flight=self._core.in_flight.reserved()[0],
            silent_s=0.0,
            figures=self._recent.figures(),
            hit_rates=self._recent.hit_rates(),
        )
        others = [
            RouterStatus(
                name=peer.name,
                model=model,
                is_own=False,
                in_flight=peer.in_flight,
                silent_s=peer.silent_s,
                figures=peer.figures,
            )
            for peer in peers.others()
        ]
        return [own, *others]

    def prefixes(self, limit: int) -> list[OwnedPrefix]:
        """At most ``limit`` nodes of the tree, hot ones and the latest; parents before children."""
        membership = self._membership
        shared = {BlockHash(replica.info.kv_namespace) for replica in membership.replicas()}
        tenants = self._owners.of(shared)
        return [
            OwnedPrefix(
                node=node,
                model=self._model,
                is_private=node.namespace not in shared,
                tenants=tenants.get(node.namespace, ()),
            )
            for node in prefix_tree(membership.index, membership.follower.latest, self.hot, limit)
        ]
