"""A page of the real frontend on the running server."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, sync_playwright
from server import Server

CHROMIUM = os.environ.get("CHROMIUM_PATH", "/usr/bin/chromium")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


@pytest.fixture(scope="module")
def page(server: Server) -> Iterator[Page]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page(viewport={"width": 1600, "height": 900})
        page.set_default_timeout(120_000)
        page.goto(server.url())
        page.wait_for_function("Boolean(window.app?.graph && window.LiteGraph?.registered_node_types?.AnimaLoader)")
        yield page
        browser.close()
