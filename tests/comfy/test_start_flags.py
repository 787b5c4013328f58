"""Start flags of ComfyUI: with each of them ours still equals native, in a process of its own.

--lowvram and --novram exclude --cpu in ComfyUI, so they need a GPU and are not among them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from host import REPO, fused_host

OLDER_HOST_BOUND = 0.5
"""An older host rounds the gated residual otherwise; in 8- and 16-bit formats that adds up over the steps."""

FLAGS = [
    "--force-fp16", "--bf16-unet", "--fp16-unet", "--fp8_e4m3fn-unet",
    "--use-split-cross-attention", "--use-quad-cross-attention", "--use-pytorch-cross-attention",
]  # fmt: skip

SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, {support!r})
import tiny, torch
from host import Host
root = Path(sys.argv[1])
tiny.write_models(root / "models")
host = Host(root, ["--cpu", sys.argv[2]])
import native
native.NativeLoader.config = tiny.CONFIG
host.nodes.NODE_CLASS_MAPPINGS["TestNativeLoader"] = native.NativeLoader
def graph(loader):
    files = {{"unet_name": "tiny.safetensors", "weight_dtype": "default"}}
    prompt = lambda text: {{"class_type": "CLIPTextEncode", "inputs": {{"clip": ["c", 0], "text": text}}}}
    return {{
        "m": {{"class_type": loader, "inputs": files}},
        "c": {{"class_type": "AnimaTextEncoderLoader", "inputs": {{"clip_name": "tiny.safetensors"}}}},
        "p": prompt("red circle"), "n": prompt(""),
        "l": {{"class_type": "EmptyLatentImage", "inputs": {{"width": 64, "height": 48, "batch_size": 1}}}},
        "k": {{"class_type": "KSampler", "inputs": {{"model": ["m", 0], "positive": ["p", 0], "negative": ["n", 0],
              "latent_image": ["l", 0], "seed": 1, "steps": 3, "cfg": 4.0, "sampler_name": "euler", "scheduler": "simple",
              "denoise": 1.0}}}},
        "o": {{"class_type": "TestCapture", "inputs": {{"value": ["k", 0], "name": "latent"}}}},
    }}
ours, theirs = (host.run(graph(loader))["latent"]["samples"] for loader in ("AnimaUNetLoader", "TestNativeLoader"))
assert theirs.isfinite().all() and theirs.std() > 0.1
print("DIFFERENCE", (ours - theirs).abs().max().item())
"""


@pytest.mark.parametrize("flag", FLAGS)
def test_start_flag(flag: str, tmp_path: Path) -> None:
    script = SCRIPT.format(support=str(REPO / "tests" / "support"))
    command = [sys.executable, "-c", script, str(tmp_path), flag]
    out = subprocess.run(command, capture_output=True, text=True, cwd="/", env=dict(os.environ))
    assert out.returncode == 0, out.stderr[-2000:]
    difference = float(out.stdout.split("DIFFERENCE")[1])
    assert difference <= (0 if fused_host() else OLDER_HOST_BOUND)
