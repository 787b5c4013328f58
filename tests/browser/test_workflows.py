"""The shipped UI workflows in the real frontend: opened, run with the Run button, their picture seen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from frontend import open_workflow
from host import REPO
from playwright.sync_api import Page
from server import WORKFLOWS, Server

SHOTS = REPO / ".local" / "screenshots"


@pytest.mark.parametrize("name", WORKFLOWS)
def test_workflow_opens_and_runs(page: Page, server: Server, name: str) -> None:
    errors: list[str] = []
    page.on("console", lambda m: errors.append(f"{m.text} {m.location}") if m.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    workflow = json.loads((REPO / "example_workflows" / f"{name}.json").read_text(encoding="utf-8"))
    open_workflow(page, workflow, name)

    state = page.evaluate(
        """() => app.graph._nodes.map(n => ({
            type: n.type, known: Boolean(LiteGraph.registered_node_types[n.type]), broken: Boolean(n.has_errors),
            widgets: (n.widgets ?? []).filter(w => w.serialize !== false).map(w => [w.name, w.value]),
        }))"""
    )
    assert len(state) == len(workflow["nodes"])
    for node, saved in zip(state, workflow["nodes"], strict=True):
        assert node["known"] and not node["broken"], node
        assert all(value is not None for _, value in node["widgets"]), node
        assert node["type"] == saved["type"]

    page.evaluate(
        """() => { for (const n of app.graph._nodes) for (const w of n.widgets ?? []) {
            if (w.name === 'steps') w.value = 2
            if (n.type === 'AnimaEmptyLatent' && ['width', 'height'].includes(w.name)) w.value = 64
        } }"""
    )
    page.evaluate("() => { app.nodeOutputs = {}; for (const n of app.graph._nodes) n.imgs = undefined }")
    before = set((server.root / "output").glob("*.png"))
    page.get_by_test_id("queue-button").or_(page.get_by_role("button", name="Run", exact=True)).first.click()
    page.wait_for_function(
        "() => app.graph._nodes.some(n => n.type === 'SaveImage' && (n.imgs?.length || app.nodeOutputs?.[n.id]?.images?.length))"
    )
    page.evaluate(
        "() => { app.canvas.ds.scale = 0.55; app.canvas.ds.offset = [40, 120]; app.graph.setDirtyCanvas(true, true) }"
    )
    page.wait_for_timeout(500)
    SHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SHOTS / f"{name}.png")
    assert set((server.root / "output").glob("*.png")) - before, "no picture was saved"
    ours = [error for error in errors if "anima" in error.lower()]
    assert not ours, ours


def test_example_workflows_are_offered_as_templates(server: Server) -> None:
    """ComfyUI lists the pack's workflows, with a thumbnail beside each."""
    listed = json.loads(server.get("/workflow_templates"))
    assert sorted(listed["anima-nodes"]) == WORKFLOWS
    for name in WORKFLOWS:
        assert Path(REPO / "example_workflows" / f"{name}.jpg").is_file(), name
