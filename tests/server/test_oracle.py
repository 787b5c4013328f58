"""`anima generate` and the ComfyUI server: from the same files and seed the same latents, bit for bit, and pixels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from host import REPO, fused_host
from PIL import Image
from safetensors.torch import load_file
from server import OFFICIAL_NAMES, Server, prepare_folder

LATENT_CODE = """
import sys, torch
from anima.pipeline import Pipeline, Request
from anima.vae import denormalize
from safetensors.torch import save_file
*files, sampler, out = sys.argv[1:]
request = Request("red (circle:1.3)", "blurry", 72, 64, 4, 4.0, 2.5, seed=12, sampler=sampler)
save_file({"latent": denormalize(Pipeline.load(*files).sample(request))}, out)
"""


@pytest.fixture(scope="module")
def exact_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose attention is torch's, as the standalone port's is."""
    root = tmp_path_factory.mktemp("exact")
    prepare_folder(root)
    running = Server(root, ("--cpu", "--use-pytorch-cross-attention"))
    yield running
    running.close()


@pytest.mark.skipif(not fused_host(), reason="older hosts round differently in the DiT")
@pytest.mark.parametrize("sampler", ["euler", "dpmpp_2m", "er_sde"])
def test_command_line_and_server_agree(exact_server: Server, tmp_path: Path, sampler: str) -> None:
    files = [str(exact_server.root / "models" / f / f"{n}.safetensors") for f, n in OFFICIAL_NAMES.items()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
    arguments = ["--dit", files[0], "--text-encoder", files[1], "--vae", files[2], "--sampler", sampler, "--seed", "12"]
    picture = tmp_path / "picture.png"
    arguments += [
        "--prompt",
        "red (circle:1.3)",
        "--negative",
        "blurry",
        "--size",
        "72x64",
        "--steps",
        "4",
        "--shift",
        "2.5",
    ]

    def run(*command: str) -> None:
        subprocess.run([sys.executable, *command], check=True, env=environment, cwd=tmp_path, capture_output=True)

    run("-m", "anima", "generate", *arguments, "--out", str(picture))
    run("-c", LATENT_CODE, *files, sampler, str(tmp_path / "latent.safetensors"))
    ours = Image.open(picture)
    graph = json.loads(ours.info["prompt"])
    graph["9"] = {"class_type": "SaveLatent", "inputs": {"samples": ["6", 0], "filename_prefix": f"latents/{sampler}"}}
    (theirs,) = exact_server.run(graph)
    (latent,) = (exact_server.root / "output" / "latents").glob(f"{sampler}*.latent")
    expected = load_file(latent)["latent_tensor"].squeeze(2)
    assert expected.std() > 0.5
    assert (load_file(tmp_path / "latent.safetensors")["latent"] == expected).all()
    assert np.array_equal(np.asarray(ours), theirs)
