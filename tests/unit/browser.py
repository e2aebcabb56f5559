"""A headless Chromium for tests of the console; a test that asks for one is skipped where there is none."""

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@asynccontextmanager
async def chromium() -> AsyncIterator[Any]:
    """A browser of playwright's."""
    api = pytest.importorskip("playwright.async_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("there is no chromium here: apt-get install chromium")
    async with api.async_playwright() as playwright:
        # Its sandbox needs what containers and root do not have; it sees pages of this machine only.
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        try:
            yield browser
        finally:
            await browser.close()


class ConsolePage:
    """A tab with the console, and what it complained of."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.complaints: list[str] = []
        self.requests: list[str] = []
        page.on("console", lambda said: said.type in ("error", "warning") and self.complaints.append(said.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("dialog", lambda dialog: self.complaints.append(f"dialog: {dialog.message}"))

    @classmethod
    async def open(cls, browser: Any, url: str, key: str | None = None, view: str = "overview", **context: Any) -> Any:
        """The console at ``url``, once it shows the state."""
        options = {"viewport": {"width": 1360, "height": 820}, "reduced_motion": "reduce", **context}
        page = await (await browser.new_context(**options)).new_page()
        made = cls(page)
        await page.goto(f"{url}/console/#/{view}")
        if key is not None:
            await page.get_by_label("Key", exact=True).fill(key)
            await page.keyboard.press("Enter")
        await made.live()
        return made

    async def live(self) -> None:
        """Until the state is there."""
        await self.page.locator("#dot[data-state=live]").wait_for(timeout=15_000)

    async def view(self, name: str) -> None:
        """Go to a view by its link."""
        await self.page.locator(f"#views a[href='#/{name}']").click()
        await self.page.locator(f"#views a[href='#/{name}'][aria-current=page]").wait_for()
