"""``GET /admin/state``: what operators are shown, whose prompts they see the beginnings of, and that it stays small."""

import json

import httpx
import pytest
from engine_deployment import ADMIN, PROMPT, Deployment
from openai_harness import Rig, listening

from warmroot.cluster.ids import BlockHash, ReplicaId
from warmroot.cluster.scaling import Decision
from warmroot.cluster.scaling_status import ScalingStatus
from warmroot.kv_store.hashing import pack_tokens
from warmroot.kv_store.prefix_tree import PrefixNode
from warmroot.router.openai.cluster_state import OwnedPrefix, ScalingStep
from warmroot.router.weights_updater import WeightsUpdater

EVIL = "<img src=x onerror=alert(1)> "


@pytest.fixture
async def deployment():
    made = Deployment()
    await made.follow()
    return made


async def state(deployment, **params):
    transport = httpx.ASGITransport(deployment.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        answer = await client.get("/admin/state", params=params, headers={"authorization": f"Bearer {ADMIN}"})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_a_request_is_in_figures_tree_and_decisions(deployment):
    replica, _ = await deployment.ask("sk")
    await deployment.ask("sk")
    seen = await state(deployment)
    assert seen["totals"]["requests_per_s"] > 0
    assert 0 < seen["totals"]["hit_rate"] < 1
    assert (seen["totals"]["running"], seen["totals"]["waiting"], seen["totals"]["failed_per_s"]) == (0, 0, 0)
    warm, cold = seen["decisions"]
    assert (warm["reason"], cold["reason"]) == ("warm", "cold")
    assert warm["replica"] == cold["replica"] == replica
    assert (warm["prompt_tokens"], warm["predicted_tokens"], warm["num_candidates"]) == (len(PROMPT), 16, 2)
    assert warm["at"] > cold["at"]
    (node,) = [node for node in seen["prefixes"] if node["parent"] is None]
    assert node["replicas"] == [replica]
    assert not node["is_private"]
    assert node["text"].startswith("the very")
    (one,) = [found for found in seen["replicas"] if found["replica"] == replica]
    assert one["hit_rate"] == pytest.approx(seen["totals"]["hit_rate"])
    assert seen["routing"]["decisions"] == [
        {"policy": "warm_prefix", "reason": "cold", "count": 1},
        {"policy": "warm_prefix", "reason": "warm", "count": 1},
    ]
    (router,) = seen["routers"]
    assert router["is_own"]
    assert seen["scaling"] == []


async def test_tenants_are_apart_and_their_prompts_are_not_shown(deployment):
    for key in ("sk", "sk-a", "sk-b"):
        await deployment.ask(key)
    roots = [node for node in (await state(deployment))["prefixes"] if node["parent"] is None]
    assert len({node["namespace"] for node in roots}) == 3
    by_tenant = {tuple(node["tenants"]): node for node in roots}
    assert set(by_tenant) == {(), ("a",), ("b",)}
    assert [by_tenant[tenant]["is_private"] for tenant in ((), ("a",), ("b",))] == [False, True, True]
    assert by_tenant["a",]["text"] is None
    assert by_tenant[()]["text"]


def a_tree(*, private):
    node = PrefixNode(
        id="00",
        parent=None,
        namespace=BlockHash(b"n" * 16),
        block_size=16,
        depth=0,
        num_tokens=64,
        head=pack_tokens([*EVIL.encode(), 99_999, 256]),
        replicas=(ReplicaId("r0"),),
        num_children=0,
        age=0,
        heat=1.5,
    )
    return [OwnedPrefix(node=node, model="org/tiny", is_private=private)]


@pytest.mark.parametrize(
    ("previews", "private", "shown"),
    [
        ("none", False, False),
        ("shared", False, True),
        ("shared", True, False),
        ("all", False, True),
        ("all", True, True),
    ],
)
async def test_whose_prompts_are_shown(previews, private, shown):
    rig = Rig(prompt_previews=previews)
    rig.cluster.tree = a_tree(private=private)
    async with rig.http() as client:
        (node,) = (await client.get("/admin/state")).json()["prefixes"]
    assert node["text"] == (EVIL + "<end>" if shown else None)  # a token that nobody knows is passed over


async def test_it_is_bounded(deployment):
    for number in range(30):
        await deployment.ask("sk", prompt=f"{number:02} is how prompt {number} begins")
    seen = await state(deployment, prefixes=5, decisions=7)
    assert (len(seen["prefixes"]), len(seen["decisions"])) == (5, 7)
    assert len(json.dumps(seen)) < 20_000
    for bad in ({"prefixes": 100_000}, {"decisions": -1}):
        transport = httpx.ASGITransport(deployment.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            answer = await client.get("/admin/state", params=bad, headers={"authorization": f"Bearer {ADMIN}"})
        assert answer.status_code == 400


async def test_what_the_autoscaler_decided():
    rig = Rig()
    rig.cluster.steps = [ScalingStep(at=5.0, model="tiny", before=1, after=3, reason="queue")]
    latest = Decision(at=6.0, before=3, target=3, ready=2, needed=2.5, signal="waiting", reasons=("work waits",))
    rig.cluster.autoscalers = lambda: [ScalingStatus(model="tiny", latest=latest)]
    async with rig.http() as client:
        answer = await client.get("/admin/state")
    assert answer.json()["scaling"] == [{"at": 5.0, "model": "tiny", "before": 1, "after": 3, "reason": "queue"}]
    (now,) = answer.json()["autoscalers"]
    assert (now["ready"], now["target"], now["signal"], now["reasons"]) == (2, 3, "waiting", ["work waits"])
    assert answer.headers["cache-control"] == "no-store"


async def test_weights_that_are_changing(deployment):
    assert (await state(deployment))["updates"] == []
    updater = WeightsUpdater(list)
    deployment.updaters |= {"m": updater, "alias": updater, "other": WeightsUpdater(list)}
    updater.stage = "2 replicas load /models/new"
    assert (await state(deployment))["updates"] == [{"model": "m", "stage": "2 replicas load /models/new"}]


def test_every_field_is_described():
    schemas = Rig().app.openapi()["components"]["schemas"]
    for name in ("AdminState", "ReplicaBody", "PrefixBody", "DecisionBody", "StoreBody", "TotalsBody", "RouterBody"):
        assert all("description" in field for field in schemas[name]["properties"].values()), name


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"host": "localhost:8000"}, 200),
        ({"host": "[::1]:8000"}, 200),
        ({"host": "127.0.0.1:8000", "origin": "http://127.0.0.1:8000"}, 200),
        ({"host": "127.0.0.1:8000", "origin": "https://elsewhere.example"}, 403),
        ({"host": "127.0.0.1:8000", "origin": "null"}, 403),
        ({"host": "rebound.example:8000"}, 403),
        ({"host": "rebound.example:8000", "origin": "http://rebound.example:8000"}, 403),
    ],
)
async def test_without_keys_no_page_of_another_site_gets_in(headers, status):
    async with Rig().http() as client:
        assert (await client.get("/admin/state", headers=headers)).status_code == status
    async with Rig(admin_keys=("root",)).http() as client:  # a page that has the key may come from anywhere
        answer = await client.get("/admin/state", headers={**headers, "authorization": "Bearer root"})
        assert answer.status_code == 200


async def test_no_other_site_may_read_it():
    origin = {"origin": "https://elsewhere.example"}
    async with Rig(admin_keys=("root",)).http() as client:
        closed = await client.get("/admin/state", headers={**origin, "authorization": "Bearer root"})
        open_ = await client.get("/v1/models", headers=origin)
    assert "access-control-allow-origin" not in closed.headers
    assert open_.headers["access-control-allow-origin"] == "*"
    async with Rig(admin_keys=("root",), allowed_origins=("https://elsewhere.example",)).http() as client:
        named = await client.get("/admin/state", headers={**origin, "authorization": "Bearer root"})
    assert named.headers["access-control-allow-origin"] == "https://elsewhere.example"


async def test_files_of_the_console():
    async with Rig(admin_keys=("root",), api_keys=({"key": "user"},)).http() as client:
        page = await client.get("/console/")
        assert page.status_code == 200
        assert "script-src 'self'" in page.headers["content-security-policy"]
        assert page.headers["x-warmroot-admin-key"] == "needed"
        assert "<script type" in page.text
        assert "onclick" not in page.text
        redirect = await client.get("/console")
        assert (redirect.status_code, redirect.headers["location"]) == (307, "console/")
        script = await client.get("/console/app.js")
        assert script.headers["content-type"].startswith("text/javascript")
        again = await client.get("/console/app.js", headers={"if-none-match": script.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        head = await client.head("/console/app.js")
        assert (head.status_code, head.content) == (200, b"")
        for path in ("/console/nothing.js", "/console/../app.py", "/console/%2e%2e/app.py", "/console/state"):
            assert (await client.get(path)).status_code in (401, 404)
        assert (await client.post("/console/app.js")).status_code == 405


async def test_the_console_where_admins_are_not_let_in():
    async with Rig().http() as client:
        assert (await client.get("/console/")).headers["x-warmroot-admin-key"] == "none"
    async with Rig(open_admin=False).http() as client:
        assert (await client.get("/console/")).status_code == 403


async def test_the_console_behind_a_path():
    rig = Rig(root_path="/llm", admin_keys=("root",))
    async with listening(rig.app) as url, httpx.AsyncClient(base_url=url, trust_env=False) as client:
        for path in ("/llm/console/", "/console/"):
            assert (await client.get(path)).status_code == 200


def test_nothing_is_taken_from_elsewhere():
    from warmroot.router.openai.routes_console import console_files

    for name, file in console_files().items():
        text = file.content.decode()
        for word in ("https://", "http://", "//cdn", "innerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert word not in text.replace("http://www.w3.org/2000/svg", ""), (name, word)
