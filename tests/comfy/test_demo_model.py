"""The bundled demo model end to end: what the prompt says is on the picture, and every broken convention shows.

The judge (support/shapes.py) is independent of the model. Scores: see docs/demo-model.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from host import Graph, Host

COUNT = 24


@pytest.fixture(scope="module")
def demo(host: Host) -> Host:
    host.module("anima.demo.files").write_demo_model(host.root / "models")
    return host


def graph(prompts: list[str], negative: str = "", cfg: float = 4.0) -> Graph:
    """All prompts as one batch."""
    files = {
        "unet_name": "anima_demo.safetensors",
        "clip_name": "qwen3_demo.safetensors",
        "vae_name": "wan_vae_demo.safetensors",
    }
    return {
        "a": {"class_type": "AnimaLoader", "inputs": {**files, "weight_dtype": "default"}},
        "p": {"class_type": "Qwen3AdapterTextEncode", "inputs": {
            "text": "\n".join(prompts), "clip": ["a", 1], "model": ["a", 0], "prompt_per_line": True}},
        "n": {"class_type": "Qwen3AdapterTextEncode", "inputs": {"text": negative, "clip": ["a", 1]}},
        "l": {"class_type": "AnimaEmptyLatent", "inputs": {"width": 128, "height": 128, "batch_size": len(prompts)}},
        "k": {"class_type": "KSampler", "inputs": {
            "model": ["a", 0], "positive": ["p", 0], "negative": ["n", 0], "latent_image": ["l", 0], "seed": 11, "steps": 20,
            "cfg": cfg, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0}},
        "d": {"class_type": "WanVAEDecode", "inputs": {"samples": ["k", 0], "vae": ["a", 2]}},
        "o": {"class_type": "TestCapture", "inputs": {"value": ["d", 0], "name": "image"}},
    }  # fmt: skip


def colors_right(host: Host, **kwargs: Any) -> int:
    """How many of COUNT held-out prompts show the right background and the right colour on it."""
    import shapes

    wanted = shapes.prompts(COUNT)
    images = host.run(graph([text for text, _ in wanted], **kwargs), fresh=True)["image"]
    seen = [shapes.look((image.numpy() * 255).astype(np.uint8)) for image in images]
    return sum(
        s is not None and (s.background, s.color) == (w.background, w.color)
        for s, (_, w) in zip(seen, wanted, strict=True)
    )


def test_the_judge_knows_drawn_pictures() -> None:
    import random

    import shapes

    rng = random.Random(9)
    for shape, color, background in shapes.held_out():
        for size in ("small", "medium", "large"):
            scene = shapes.Scene(background, (shapes.Thing(shape, color, size, "center"),))
            assert shapes.look(shapes.draw(scene, rng)) == shapes.Seen(background, color, shape)


def test_held_out_prompts_show_their_colours(demo: Host) -> None:
    right = colors_right(demo)
    print(f"{right} of {COUNT}")
    assert right >= 0.75 * COUNT


def test_negative_prompt_acts(demo: Host) -> None:
    """Every picture changes with the negative prompt, and not at all at cfg 1, where it has no part."""
    import shapes

    wanted = shapes.prompts(8)
    plain = demo.run(graph([text for text, _ in wanted]), fresh=True)["image"]
    against = demo.run(graph([text for text, _ in wanted], negative=wanted[0][0]), fresh=True)["image"]
    assert all(not torch.equal(a, b) for a, b in zip(plain, against, strict=True))
    without = [
        demo.run(graph([text for text, _ in wanted], negative=n, cfg=1.0), fresh=True)["image"] for n in ("", "red")
    ]
    assert torch.equal(*without)


@contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = owner.__dict__[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def broken(host: Host, what: str) -> Any:
    """A context in which one convention of the port is broken."""
    transformer = host.module("anima.transformer")
    model, adapter = host.module("nodes.model"), host.module("anima.adapter")
    forward = model.HostedTransformer.__dict__["forward"]
    features = transformer.timestep_features

    def other_order(self: Any, states: Any, ids: Any) -> Any:
        x = self.in_proj(self.embed(ids, out_dtype=states.dtype))
        rope, source = (adapter.adapter_rope(n, self.head_dim, x) for n in (x.shape[1], states.shape[1]))
        for block in self.blocks:
            x = block(x, states, rope, source)
        return self.out_proj(self.norm(x))

    run_adapter: Callable[..., Any] = model.AnimaModel.__dict__["run_adapter"]
    return {
        "velocity sign": lambda: patched(model.HostedTransformer, "forward", lambda *a, **k: -forward(*a, **k)),
        "timestep x1000": lambda: patched(transformer, "timestep_features", lambda t, dim: features(t * 1000, dim)),
        "adapter norm order": lambda: patched(adapter.LLMAdapter, "forward", other_order),
        "T5 ids shifted": lambda: patched(
            model.AnimaModel, "run_adapter", lambda self, s, ids, w, d: run_adapter(self, s, ids + 1, w, d)
        ),
    }[what]()  # fmt: skip


@pytest.mark.parametrize("what", ["velocity sign", "timestep x1000", "adapter norm order", "T5 ids shifted"])
def test_a_broken_convention_shows(demo: Host, what: str) -> None:
    with broken(demo, what):
        right = colors_right(demo)
    print(f"{what}: {right} of {COUNT}")
    assert right < 0.25 * COUNT
