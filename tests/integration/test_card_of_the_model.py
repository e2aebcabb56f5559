"""The card that an ingress reads for itself where there is no replica is the one that replicas bring."""

from dataclasses import replace

import pytest

from warmroot.actors.embedded_bus import find_bus
from warmroot.actors.model_card import read_card
from warmroot.cluster.config import WarmrootConfig

from .cluster_harness import Cluster
from .conftest import KEYS

pytestmark = [pytest.mark.cluster, pytest.mark.model]


async def test_an_ingress_knows_what_replicas_know_of_their_model(cluster: Cluster):
    bus = find_bus()
    assert bus is not None
    card = await bus.card("smollm2")
    assert card is not None
    own = read_card(WarmrootConfig.of("smollm2", **KEYS), card.token)
    assert replace(own, build=card.build) == card
