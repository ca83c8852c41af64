"""Pictures of the server's page for the docs: `python -m tools.screenshot_page` writes docs/server-page*.png.

A real server under real load: two tenants, prompts that share beginnings, a pool small enough to fill.
"""

import json
import random
import sys
import tempfile
import threading
import urllib.request
from pathlib import Path
from time import sleep

from tests.server.browser import Browser
from tests.server.kit import Server

FOLDER = Path(__file__).parents[1] / "docs"
KEYS = ("first-key", "second-key")
OPTIONS = ("--kv", "k8v4", "--num-blocks", "480", "--max-num-seqs", "16", "--max-num-batched-tokens", "512")
FREE = 60  # blocks, when the picture is taken at the latest
BEGINNINGS = [
    "The harbour was built in stone by three families who shared the fish, the salt and the debts. " * 15,
    "You are a patient assistant. Answer in short sentences, name your sources, and say what is unknown. "
    * 14,
    "Minutes of the meeting, in order: attendance, the roof, the boiler, the garden, and other business. "
    * 15,
    "Chapter one. In which the train is late, the station is empty, and a letter is opened by mistake. " * 15,
]
_COUNT = "Number(document.querySelector('#legend b').textContent)"
ENDINGS = ["In the year", "The answer", "Nobody had", "First of all", "On the next day", "It is said that"]


class Load(threading.Thread):
    """Requests of one tenant, one after the other."""

    def __init__(self, url: str, key: str, beginnings: list[str], seed: int) -> None:
        super().__init__(daemon=True)
        self._url, self._key, self._beginnings = url, key, beginnings
        self._random = random.Random(seed)
        self.ends = False

    def run(self) -> None:
        """Ask until told to end."""
        choose = self._random
        while not self.ends:
            prompt = choose.choice(self._beginnings)[: choose.randrange(500, 1400)]
            body = {
                "model": "tiny",
                "prompt": f"{prompt} {choose.choice(ENDINGS)}",
                "max_tokens": choose.randrange(60, 220),
                "n": choose.choice([1, 1, 1, 2]),
            }
            headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
            request = urllib.request.Request(
                f"{self._url}/v1/completions", json.dumps(body).encode(), headers, method="POST"
            )
            with urllib.request.urlopen(request, timeout=120) as answer:
                answer.read()
            sleep(choose.random() * 0.2)


def main(folder: Path) -> None:
    """Take the pictures."""
    with tempfile.NamedTemporaryFile("w", suffix=".keys") as keys:
        keys.write("\n".join(KEYS) + "\n")
        keys.flush()
        with Server(*OPTIONS, "--api-key-file", keys.name, key=KEYS[0]) as server:
            loads = [
                Load(server.url, KEYS[i % 3 == 2], BEGINNINGS[:3] if i % 3 < 2 else BEGINNINGS[2:], i)
                for i in range(9)
            ]
            for load in loads:
                load.start()
                sleep(1.0)  # one after the other, as people come
            with Browser(password=KEYS[0]) as browser:
                take(browser, server.url, folder)
            for load in loads:
                load.ends = True
            for load in loads:
                load.join(120)


def take(browser: Browser, url: str, folder: Path) -> None:
    """The page after a while, wide and on a phone."""
    browser.prefer(color_scheme="dark", reduced_motion="reduce")
    browser.resize(1440, 1330, ratio=1.5)
    browser.open(url)
    browser.wait("document.querySelector('#state').dataset.state === 'ready'")
    browser.wait(f"{_COUNT} < {FREE}")
    browser.run(f"document.querySelector('#key').value = '{KEYS[0]}'")
    browser.run("document.querySelector('#send').click()")
    browser.rest(1.2)
    browser.screenshot(folder / "server-page.png")
    browser.resize(390, 844, ratio=2, is_phone=True)
    browser.rest(1.5)
    browser.screenshot(folder / "server-page-phone.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
