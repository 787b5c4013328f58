"""What tests do with the real frontend."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import Page


def open_workflow(page: Page, workflow: dict[str, Any], name: str) -> None:
    page.evaluate("([workflow, name]) => app.loadGraphData(workflow, true, true, name)", [workflow, name])
    page.keyboard.press("Escape")
