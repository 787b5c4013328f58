"""The official Anima templates, which we did not write: opened in the real frontend, run with our loaders.

The frontend resolves subgraphs and switches into an API graph. In it the loaders are swapped for ours, sizes and steps are
made small, and what needs models of others is put aside: the depth estimator (the picture itself stands for its depth)
and the painted mask (the picture's own).
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from frontend import open_workflow
from host import Graph
from playwright.sync_api import Page
from server import Server

_spec = find_spec("comfyui_workflow_templates_json")
if _spec is None or _spec.origin is None:
    pytest.skip("the package of the official templates is not installed", allow_module_level=True)
TEMPLATES = sorted((Path(_spec.origin).parent / "templates").glob("image_anima_*.json"))
OURS = {"UNETLoader": "AnimaUNetLoader", "CLIPLoader": "AnimaTextEncoderLoader", "VAELoader": "AnimaVAELoader"}
SIZE = 64


def test_there_are_official_templates() -> None:
    assert len(TEMPLATES) >= 5


def api_graph(page: Page, template: Path) -> Graph:
    open_workflow(page, json.loads(template.read_text(encoding="utf-8")), template.stem)
    return page.evaluate("async () => (await app.graphToPrompt()).output")


def with_our_loaders(graph: Graph, turbo: bool) -> Graph:
    """Swap loaders, shrink, and replace what needs other models by the input picture."""
    (picture,) = [id for id, node in graph.items() if node["class_type"] == "LoadImage"] or [None]

    def stand_in(kind: str, slot: int) -> list[Any] | None:
        """The picture in place of a depth map, the picture's own mask in place of a painted one."""
        if kind.startswith(("DA3", "LoadDA3")):
            return [picture, 0]
        return [picture, min(slot, 1)] if kind == "Painter" else None

    out: Graph = {}
    for id, node in graph.items():
        kind, inputs = node["class_type"], dict(node["inputs"])
        if stand_in(kind, 0):
            continue
        for name, value in inputs.items():
            if isinstance(value, list) and len(value) == 2 and str(value[0]) in graph:
                inputs[name] = stand_in(graph[str(value[0])]["class_type"], value[1]) or value
            elif "megapixels" in name:
                inputs[name] = 0.01
        if kind == "UNETLoader":
            inputs = {"unet_name": "anima-base-v1.0.safetensors", "weight_dtype": "default"}
        elif kind == "CLIPLoader":
            inputs = {"clip_name": inputs["clip_name"]}
        elif kind == "LoadImage":
            inputs["image"] = "example.png"
        elif kind == "EmptyLatentImage":
            inputs |= {"width": SIZE, "height": SIZE}
        elif kind == "KSampler":
            inputs["steps"] = 2
        elif kind == "PrimitiveBoolean":
            inputs["value"] = turbo
        out[id] = {"class_type": OURS.get(kind, kind), "inputs": inputs}
    return out


@pytest.mark.parametrize("turbo", [False, True], ids=["base", "turbo"])
@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.stem)
def test_official_template_runs_on_our_loaders(page: Page, server: Server, template: Path, turbo: bool) -> None:
    graph = with_our_loaders(api_graph(page, template), turbo)
    kinds = [node["class_type"] for node in graph.values()]
    assert set(OURS.values()) <= set(kinds) and not set(OURS) & set(kinds)
    assert ("lllite" in template.stem) == ("AnimaLLLiteApply" in kinds)
    pictures = server.run(graph)
    assert pictures and all(picture.std() > 3 for picture in pictures)
