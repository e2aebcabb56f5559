"""The console in a headless Chromium, over engines with real caches: key, views, keyboard, colours, hostile prompts."""

import asyncio
from contextlib import asynccontextmanager

import httpx
import pytest
from browser import ConsolePage, chromium
from engine_deployment import ADMIN, Deployment
from openai_harness import listening

from warmroot.router.weights_updater import WeightsUpdater

VIEWS = ("overview", "replicas", "prefixes", "decisions", "scaling", "events", "playground")
SYSTEM = "You are a helpful assistant. Be brief. "
EVIL = "<img src=x onerror=alert(1)><script>alert(2)</script>"


@pytest.fixture
async def deployment():
    made = Deployment()
    await made.follow()
    for question in ("What is Ray?", "What is a KV cache?", EVIL):
        await made.ask("sk", prompt=SYSTEM + question)
    for question in ("secret", "hidden"):
        await made.ask("sk-a", prompt=SYSTEM + question)
    return made


@asynccontextmanager
async def opened(deployment, view="overview", **context):
    async with listening(deployment.app) as url, chromium() as browser:
        yield await ConsolePage.open(browser, url, ADMIN, view, **context)


async def test_it_asks_for_a_key_and_keeps_it_to_itself(deployment):
    async with listening(deployment.app) as url, chromium() as browser:
        page = await (await browser.new_context()).new_page()
        tab = ConsolePage(page)
        await page.goto(f"{url}/console")
        dialog = page.get_by_role("dialog", name="Admin key")
        await dialog.wait_for()
        assert tab.complaints == []  # nothing was asked for in vain
        await page.keyboard.press("Escape")
        await dialog.wait_for()
        await page.get_by_label("Key", exact=True).fill("sk-wrong")
        await page.get_by_role("button", name="Open the console").click()
        await page.get_by_role("alert").get_by_text("valid API key").wait_for()
        await page.get_by_label("Key", exact=True).fill("sk-a")
        await page.keyboard.press("Enter")
        await page.get_by_role("alert").get_by_text("needs an admin's key").wait_for()
        await page.get_by_label("Key", exact=True).fill(ADMIN)
        await page.keyboard.press("Enter")
        await tab.live()
        assert await dialog.count() == 0
        assert await page.evaluate("() => Object.values(sessionStorage)") == [ADMIN]
        assert ADMIN not in str(await page.evaluate("() => Object.values(localStorage)"))
        assert ADMIN not in await page.content()
        assert not any(ADMIN in request for request in tab.requests)
        assert all(request.startswith(url) for request in tab.requests)
        assert not await page.context.cookies()
        await page.reload()
        await tab.live()
        await page.get_by_role("button", name="Sign out").click()
        await dialog.wait_for()
        assert await page.evaluate("() => sessionStorage.length") == 0


async def test_views_show_what_is_there_without_a_complaint(deployment):
    async with opened(deployment) as tab:
        page = tab.page
        expected = {
            "overview": "Latest decisions",
            "replicas": "All replicas",
            "prefixes": "Chosen prefix",
            "decisions": "Latest decisions",
            "scaling": "None. The number of replicas is fixed",
            "events": "In touch",
            "playground": "System prompt",
        }
        for view in VIEWS:
            await tab.view(view)
            await page.get_by_role("main").get_by_text(expected[view]).first.wait_for()
        assert tab.complaints == []
        await tab.view("replicas")
        rows = page.get_by_role("group", name="Replicas").get_by_role("row")
        assert await rows.count() == 3
        await tab.view("decisions")
        assert await page.get_by_role("button", name="why it went there").count() == 5


async def test_weights_that_are_changing(deployment):
    updater = deployment.updaters["m"] = WeightsUpdater(list)
    updater.stage = "2 replicas load <b>new</b>"
    async with opened(deployment, "replicas") as tab:
        news = tab.page.get_by_role("main").get_by_role("status")
        await news.get_by_text("New weights of m: 2 replicas load <b>new</b>").wait_for()
        updater.stage = ""
        await news.get_by_text("New weights").wait_for(state="detached")
        await tab.view("overview")
        updater.stage = "2 replicas change to f00"
        await news.get_by_text("2 replicas change to f00").wait_for()
        assert tab.complaints == []


async def test_looks_that_overlap_do_not_multiply(deployment):
    async with opened(deployment) as tab:
        looks = sum("/admin/state" in request for request in tab.requests)
        await tab.page.evaluate("for (let i = 0; i < 20; i++) dispatchEvent(new Event('online'))")
        await tab.page.wait_for_timeout(3500)
        later = sum("/admin/state" in request for request in tab.requests)
        assert later - looks <= 20 + 5


async def test_a_new_request_is_seen_within_three_seconds(deployment):
    async with opened(deployment, "prefixes") as tab:
        page = tab.page
        await deployment.ask("sk", prompt=SYSTEM + "Zebras are striped because of flies.")
        await page.get_by_role("treeitem", name="Zebras are").wait_for(timeout=3000)
        await tab.view("decisions")
        await page.get_by_role("button", name="why it went there").nth(5).wait_for(timeout=3000)
        assert tab.complaints == []


async def test_why_a_request_went_there(deployment):
    async with opened(deployment, "decisions") as tab:
        page = tab.page
        fold = page.get_by_role("button", name="why it went there").first
        await fold.focus()
        await page.keyboard.press("Enter")
        candidates = page.get_by_role("table", name="Candidates")
        assert await candidates.get_by_role("row").count() == 3
        assert await candidates.get_by_text("chosen").count() == 1
        await asyncio.sleep(1.2)  # it stays unfolded, and focused, as the state comes anew
        assert await candidates.count() == 1
        assert await fold.get_attribute("aria-expanded") == "true"
        await page.get_by_role("searchbox").fill("no such request")
        await page.get_by_text("No decision matches").wait_for()


async def test_text_of_prompts_is_only_text(deployment):
    async with opened(deployment, "prefixes") as tab:
        page = tab.page
        await page.get_by_role("treeitem", name="<img src=x").first.click()
        await page.locator(".details").get_by_text(EVIL[:20]).wait_for()
        assert await page.locator("main img, main script").count() == 0
        await tab.view("playground")
        await page.get_by_label("Most tokens").fill("8")
        await page.get_by_label("System prompt").fill("")
        await page.get_by_label("Prompt", exact=True).fill(EVIL)
        await page.keyboard.press("Control+Enter")
        await page.get_by_text("tokens cached").wait_for()
        assert await page.locator(".turn.user .said").inner_text() == EVIL
        assert await page.locator("main img, main script").count() == 0
        assert tab.complaints == []


async def test_what_is_a_tenants_own_is_marked_and_has_no_text(deployment):
    async with opened(deployment, "prefixes") as tab:
        await tab.page.get_by_text("tenant a").wait_for()
        assert "secret" not in await tab.page.get_by_role("main").inner_text()


async def test_the_tree_is_walked_by_keys(deployment):
    async with opened(deployment, "prefixes") as tab:
        page = tab.page
        chosen = page.locator("[role=treeitem][aria-selected=true]")
        first = await chosen.get_attribute("data-id")
        await chosen.focus()
        for key, moves in (
            ("ArrowRight", True),
            ("ArrowLeft", True),
            ("End", True),
            ("Home", True),
            ("ArrowUp", False),
        ):
            before = await chosen.get_attribute("data-id")
            await page.keyboard.press(key)
            assert (await chosen.get_attribute("data-id") != before) is moves, key
            assert await page.evaluate("() => document.activeElement.dataset.id") == await chosen.get_attribute(
                "data-id"
            )
        assert await chosen.get_attribute("data-id") == first
        assert await page.locator("[role=treeitem][tabindex='0']").count() == 1


async def test_views_have_keys(deployment):
    async with opened(deployment) as tab:
        page = tab.page
        for number, view in enumerate(VIEWS, 1):
            await page.keyboard.press(str(number))
            await page.locator(f"#views a[href='#/{view}'][aria-current=page]").wait_for()
        prompt = page.get_by_label("Prompt", exact=True)
        await prompt.fill("")
        await prompt.press("1")  # what is typed goes nowhere else
        assert await prompt.input_value() == "1"
        assert "playground" in page.url


async def test_the_playground_tells_what_became_of_a_request(deployment):
    async with opened(deployment, "playground") as tab:
        page = tab.page
        await page.get_by_label("Most tokens").fill("12")
        await page.get_by_label("System prompt").fill("Be brief.")
        await page.get_by_label("Prompt", exact=True).fill("Hello")
        await page.get_by_role("button", name="Send").click()
        report = page.locator(".facts-line")
        await report.get_by_text("12 tokens", exact=True).wait_for()
        text = await report.inner_text()
        assert "TTFT" in text
        assert "prompt tokens cached" in text
        assert await report.locator(".chip").get_attribute("title") in deployment.replicas
        assert tab.complaints == []


async def test_a_lost_connection_is_told_and_mends(deployment):
    async with opened(deployment) as tab:
        page = tab.page
        await page.context.set_offline(True)
        await page.get_by_role("status").get_by_text("Connection lost").wait_for()
        assert await page.get_by_role("main").get_by_text("Latest decisions").count() == 1  # what is known stays
        await page.context.set_offline(False)
        await tab.live()


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_everybody_can_use_it(deployment, scheme):
    base = pytest.importorskip("axe_playwright_python.base", reason="axe-playwright-python is not installed")
    async with opened(deployment, color_scheme=scheme, bypass_csp=True) as tab:
        page = tab.page
        for view in VIEWS:
            await tab.view(view)
            if view == "decisions":
                await page.get_by_role("button", name="why it went there").first.click()
            await page.evaluate(base.AXE_FILE_PATH.read_text())
            found = await page.evaluate("() => axe.run()")
            faults = [
                f"{fault['id']}: {node['target']} {node.get('failureSummary', '')}"
                for fault in found["violations"]
                for node in fault["nodes"]
            ]
            assert not faults, (view, faults)
        assert tab.complaints == []


async def test_colours_follow_the_system_or_the_choice(deployment):
    async with opened(deployment, color_scheme="dark") as tab:
        page = tab.page

        async def ground():
            return await page.evaluate("() => getComputedStyle(document.body).backgroundColor")

        dark = await ground()
        button = page.get_by_role("button", name="Colours: system")
        await button.click()
        light = await ground()
        assert light != dark
        await page.get_by_role("button", name="Colours: light").click()
        assert await ground() == dark
        await page.reload()
        await tab.live()
        await page.get_by_role("button", name="Colours: dark").wait_for()


async def test_without_keys_nothing_is_asked(deployment):
    from openai_harness import Rig

    async with listening(Rig().app) as url, chromium() as browser:
        tab = await ConsolePage.open(browser, url)
        assert await tab.page.get_by_role("button", name="Sign out").count() == 0
        assert tab.complaints == []
        async with httpx.AsyncClient(trust_env=False) as client:
            assert (await client.get(f"{url}/console/icon.svg")).status_code == 200
