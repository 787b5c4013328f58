"""Whole generations through /prompt."""

from __future__ import annotations

import json

import numpy as np
import pytest
from server import WORKFLOWS, PromptError, Server, shipped_workflow

SIZES = {"anima_hires_fix": 96}


@pytest.mark.parametrize("name", WORKFLOWS)
def test_shipped_workflow_makes_a_picture(server: Server, name: str) -> None:
    (picture,) = server.run(shipped_workflow(name))
    assert picture.shape == (SIZES.get(name, 64),) * 2 + (3,)
    assert picture.std() > 3, "the picture is flat"


def test_same_seed_same_picture_other_seed_another(server: Server) -> None:
    graph = shipped_workflow("anima_text_to_image")
    (first,) = server.run(graph)
    graph["7"]["inputs"]["filename_prefix"] = "again"
    (again,) = server.run(graph)
    graph["5"]["inputs"]["seed"] += 1
    (other,) = server.run(graph)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_server_runs_the_next_prompt_after_an_error(server: Server) -> None:
    graph = shipped_workflow("anima_text_to_image")
    path = server.root / "models" / "diffusion_models" / "truncated.safetensors"
    whole = (server.root / "models" / "diffusion_models" / "anima-base-v1.0.safetensors").read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    graph["1"]["inputs"]["unet_name"] = "truncated.safetensors"
    with pytest.raises(PromptError, match="cut off"):
        server.run(graph)
    (picture,) = server.run(shipped_workflow("anima_text_to_image"))
    assert picture.std() > 3


def test_every_node_is_described(server: Server) -> None:
    """Display name, description, tooltips on all inputs and outputs, search aliases, a help page."""
    info = json.loads(server.get("/object_info"))
    ours = {name: node for name, node in info.items() if node["python_module"] == "custom_nodes.anima-nodes"}
    assert len(ours) >= 10
    for name, node in ours.items():
        assert node["display_name"] != name and node["description"], name
        assert node["search_aliases"], name
        assert node["category"].startswith("Anima/"), name
        for group in ("required", "optional"):
            for input_name, spec in node["input"].get(group, {}).items():
                assert spec[1].get("tooltip"), f"{name}.{input_name}"
        assert all(node["output_tooltips"]), name
        page = server.get(f"/extensions/anima-nodes/docs/{name}.md").decode()
        assert page.startswith("# "), name


def test_pack_was_loaded_without_a_complaint(server: Server) -> None:
    lines = [line for line in server.log().splitlines() if "anima-nodes" in line and "IMPORT FAILED" in line]
    assert not lines


@pytest.mark.parametrize("format", ["fp8", "fp8_scaled", "nf4", "gguf:Q8_0", "gguf:Q4_0"])
def test_quantised_files_run_through_prompt(server: Server, format: str) -> None:
    from anima.quantize import quantize_dit

    folder = server.root / "models" / "diffusion_models"
    name = format.replace(":", "_") + (".gguf" if format.startswith("gguf") else ".safetensors")
    if not (folder / name).exists():
        quantize_dit(folder / "anima-base-v1.0.safetensors", folder / name, format)
    graph = shipped_workflow("anima_text_to_image")
    (plain,) = server.run(graph)
    graph["1"]["inputs"]["unet_name"] = name
    (picture,) = server.run(graph)
    assert picture.std() > 3 and 0 < np.abs(picture.astype(int) - plain).mean() < 25
