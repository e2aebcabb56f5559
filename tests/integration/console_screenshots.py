"""Pictures of the console for the documentation: a server with two replicas of SmolLM2 under some load, and a browser.

``python -m tests.integration.console_screenshots docs/console``; ``make screenshots`` does it.
"""

import asyncio
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx
from PIL import Image

from ..unit.browser import ConsolePage, chromium
from .server_process import ServerProcess

KEY = "sk-screenshots-0123456789"
VIEWS = ("overview", "replicas", "prefixes", "decisions", "scaling", "events", "playground")
ASSISTANTS = (
    "You are a cook who explains dishes to beginners. Name every ingredient and every step, and warn of what burns.",
    "You are a patient teacher of physics. Explain with examples from everyday life, and never use a formula.",
    "You are a librarian. Recommend books by what the reader liked before, and say in a sentence why.",
)
QUESTIONS = (
    "What is a good soup for a cold evening?",
    "Why is the sky blue?",
    "Which novel should I read after Moby Dick?",
    "How do magnets work?",
    "What can I do with old bread?",
)
MOST_BYTES = 150_000


async def load(url: str, seconds: float) -> None:
    """Chats that share system prompts, a few at a time."""
    rng = random.Random(7)
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds

    async def client() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as http:
            while loop.time() < until:
                messages = [{"role": "system", "content": rng.choice(ASSISTANTS)}]
                for _ in range(rng.randint(1, 2)):
                    messages.append({"role": "user", "content": rng.choice(QUESTIONS)})
                    body = {"model": "smollm2", "messages": messages, "max_tokens": 24, "temperature": 0}
                    answer = await http.post("/v1/chat/completions", json=body)
                    messages.append(answer.json()["choices"][0]["message"])
                    await asyncio.sleep(rng.uniform(0.2, 1.0))

    await asyncio.gather(*(client() for _ in range(3)))


async def shoot(url: str, folder: Path) -> None:
    """Every view in light colours, and the first two in dark ones."""
    async with chromium() as browser:
        work = asyncio.create_task(load(url, 45))
        tab = await ConsolePage.open(browser, url, KEY, color_scheme="light")
        await asyncio.sleep(30)
        for view in VIEWS:
            await tab.view(view)
            await _prepare(tab.page, view)
            await _save(tab.page, folder / f"{view}.png")
        await work
        dark = await ConsolePage.open(browser, url, KEY, "prefixes", color_scheme="dark")
        await _prepare(dark.page, "prefixes")
        await _save(dark.page, folder / "prefixes_dark.png")
        assert not tab.complaints + dark.complaints


async def _prepare(page: Any, view: str) -> None:
    if view == "decisions":
        await page.get_by_role("button", name="why it went there").nth(2).click()
    elif view == "playground":
        await page.get_by_label("Most tokens").fill("48")
        for question in ("Why do leaves turn red?", "And why do they fall?"):
            await page.get_by_label("Prompt", exact=True).fill(question)
            await page.keyboard.press("Control+Enter")
            await page.get_by_role("button", name="Stop").and_(page.locator(":disabled")).wait_for(timeout=60_000)
    await asyncio.sleep(1.5)


async def _save(page: Any, path: Path) -> None:
    await page.screenshot(path=path)
    # 256 colours are enough for flat ones, and half of the bytes.
    with Image.open(path) as image:
        image.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
    if path.stat().st_size > MOST_BYTES:
        raise SystemExit(f"{path} has {path.stat().st_size} bytes, more than {MOST_BYTES}")


def main() -> None:
    """Start a server, take the pictures, stop it."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as logs:
        flags = ("--num-replicas", "2", "--admin-api-key", KEY)
        server = ServerProcess(Path(logs), *flags)
        try:
            server.wait_ready()
            asyncio.run(shoot(server.url, folder))
        finally:
            server.process.terminate()
            server.ended(60)


if __name__ == "__main__":
    main()
