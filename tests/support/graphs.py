"""Pieces of API-format graphs of our nodes on the tiny files."""

from __future__ import annotations

from typing import Any

from host import Graph


def capture(node: str, output: int, name: str) -> dict[str, Any]:
    return {"class_type": "TestCapture", "inputs": {"value": [node, output], "name": name}}


def loaders(**changes: str) -> Graph:
    names = {"unet_name": "tiny.safetensors", "clip_name": "tiny.safetensors", "vae_name": "tiny.safetensors"} | changes
    return {
        "a": {"class_type": "AnimaLoader", "inputs": {**names, "weight_dtype": "default"}},
        "oa": capture("a", 3, "report"),
    }


def prompt(text: str, finished: bool = False) -> dict[str, Any]:
    inputs: dict[str, Any] = {"text": text, "clip": ["a", 1]}
    return {"class_type": "Qwen3AdapterTextEncode", "inputs": inputs | ({"model": ["a", 0]} if finished else {})}


def sampler(positive: str, size: int = 64, **changes: Any) -> Graph:
    inputs = {
        "model": ["a", 0], "positive": [positive, 0], "negative": ["neg", 0], "latent_image": ["lat", 0], "seed": 3,
        "steps": 2, "cfg": 3.0, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0,
    }  # fmt: skip
    return {
        "neg": prompt(""),
        "lat": {"class_type": "AnimaEmptyLatent", "inputs": {"width": size, "height": size, "batch_size": 1}},
        "ks": {"class_type": "KSampler", "inputs": inputs | changes},
        "oks": capture("ks", 0, "latent"),
    }
