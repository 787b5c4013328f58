"""The standalone pipeline against ComfyUI: the same seed gives the same picture.

Here latents agree within ORACLE_BOUND of their largest value in fp32, as on the CPU ComfyUI uses attentions of its
own by default; with --use-pytorch-cross-attention they are equal bits (tests/server/test_oracle.py).
"""

from __future__ import annotations

import pytest
import torch
from host import Host

from anima.pipeline import Pipeline, Request

ORACLE_BOUND = 1e-4


@pytest.mark.parametrize("cfg", [1.0, 4.0])
@pytest.mark.parametrize("sampler", ["euler", "dpmpp_2m", "er_sde"])
def test_pipeline_equals_ksampler(host: Host, sampler: str, cfg: float) -> None:
    request = Request(
        "red (circle:1.3), white background", "blurry", width=72, height=64, steps=4, cfg=cfg, shift=2.5, seed=12,
        sampler=sampler, batch=2,
    )  # fmt: skip
    files = [str(host.root / "models" / f / "tiny.safetensors") for f in ("diffusion_models", "text_encoders", "vae")]
    pipeline = Pipeline.load(*files)
    latent = pipeline.sample(request)

    graph = host.module("anima.metadata").reproducing_graph(request, *["tiny.safetensors"] * 3)
    graph["9"] = {"class_type": "TestCapture", "inputs": {"value": ["6", 0], "name": "latent"}}
    graph["10"] = {"class_type": "TestCapture", "inputs": {"value": ["7", 0], "name": "image"}}
    out = host.run(graph)
    from anima.vae import denormalize

    expected = out["latent"]["samples"].squeeze(2)
    assert (denormalize(latent) - expected).abs().max() <= ORACLE_BOUND * expected.abs().max()
    assert (pipeline.decode(latent) - out["image"]).abs().max() <= 1e-3
    assert expected.std() > 0.5 and torch.isfinite(expected).all()
