"""``POST /admin/update_weights``: what it takes, refuses and answers."""

import pytest
from openai_harness import Rig

from warmroot.cluster.weights_update import NewWeights


async def test_it_passes_on_what_it_is_asked_and_says_what_became_of_it():
    rig = Rig()
    response = await rig.post("/admin/update_weights", {"weights": "/models/new", "mode": "abort", "one_by_one": True})
    assert response.json() == {
        "weights_version": "f00",
        "load_s": 2.0,
        "replicas": [{"replica": "r1", "weights_version": "f00", "seconds": 0.5}],
        "lost": [],
    }
    expected = {"mode": "abort", "one_by_one": True, "timeout_s": 600.0}
    assert rig.updater.asked == [(NewWeights(model="/models/new"), expected)]


async def test_weights_of_an_actor_get_a_name_that_is_new():
    rig = Rig()
    for _ in range(2):
        assert (await rig.post("/admin/update_weights", {"actor": "training/trainer"})).status_code == 200
    first, second = (new.version for new, _ in rig.updater.asked)
    assert first != second
    assert first.startswith("training.trainer-")


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({}, 400),
        ({"weights": "a", "actor": "b"}, 400),
        ({"weights": "a", "mode": "now"}, 400),
        ({"weights": "a", "version": "no spaces"}, 400),
        ({"weights": "a", "timeout": 0}, 400),
        ({"weights": "a", "unknown": 1}, 400),
        ({"weights": "a", "model": "other"}, 404),
    ],
    ids=str,
)
async def test_what_it_refuses(body: dict, status: int):
    rig = Rig()
    assert (await rig.post("/admin/update_weights", body)).status_code == status
    assert rig.updater.asked == []


async def test_it_is_for_admins():
    rig = Rig(api_keys=[{"key": "user"}], admin_keys=["admin"])
    for key, status in (("user", 403), ("admin", 200)):
        headers = {"authorization": f"Bearer {key}"}
        response = await rig.post("/admin/update_weights", {"weights": "/models/new"}, headers=headers)
        assert response.status_code == status


async def test_every_status_that_it_answers_with_is_documented():
    async with Rig().http() as client:
        document = (await client.get("/openapi.json")).json()
    statuses = set(document["paths"]["/admin/update_weights"]["post"]["responses"])
    assert statuses == {"200", "400", "401", "403", "404", "413", "429", "431", "500", "503", "504"}
