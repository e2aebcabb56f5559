"""The console of a running cluster of SmolLM2: what a request leaves in it, and a chat in the playground."""

import httpx
import pytest
from browser import ConsolePage, chromium

from .cluster_harness import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.model]


async def test_a_request_is_seen_within_three_seconds(cluster: Cluster):
    async with chromium() as browser, httpx.AsyncClient(base_url=cluster.url, timeout=60, trust_env=False) as client:
        tab = await ConsolePage.open(browser, cluster.url, view="prefixes")
        prompt = "The quokka console test has a prompt of its own, which is long enough to fill two blocks or three."
        answer = await client.post("/v1/completions", json={"model": "smollm2", "prompt": prompt, "max_tokens": 4})
        name = answer.json()["id"]
        await tab.page.get_by_role("treeitem", name="The quokka console").first.wait_for(timeout=3000)
        await tab.view("decisions")
        await tab.page.get_by_role("button", name=name).wait_for(timeout=3000)
        await tab.view("playground")
        await tab.page.get_by_label("Most tokens").fill("16")
        await tab.page.get_by_label("Prompt", exact=True).fill("What is a quokka?")
        await tab.page.keyboard.press("Control+Enter")
        report = tab.page.locator(".facts-line")
        await report.get_by_text("prompt tokens cached").wait_for(timeout=30_000)
        assert await report.locator(".chip").get_attribute("title") in {r.info.replica for r in cluster.replicas()}
        assert tab.complaints == []
