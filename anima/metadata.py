"""What a PNG carries: a ComfyUI graph of our nodes that makes the same picture, and the plain-text parameters."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from .pipeline import Request


def reproducing_graph(
    request: Request, dit: str, text_encoder: str, vae: str, loras: Sequence[tuple[str, float]] = ()
) -> dict[str, Any]:
    """API-format graph for ComfyUI with this pack; file names as in its models folders, LoRAs with strengths."""
    model, clip = ["1", 0], ["1", 1]
    extra: dict[str, Any] = {}
    if loras:
        text = "\n".join(f"{name}:{strength:g}" for name, strength in loras)
        extra["l"] = {"class_type": "AnimaLoraStack", "inputs": {"model": model, "clip": clip, "loras": text}}
        model, clip = ["l", 0], ["l", 1]
    prompt = {"clip": clip, "prompt_per_line": False}
    return {
        **extra,
        "1": {"class_type": "AnimaLoader", "inputs": {
            "unet_name": dit, "clip_name": text_encoder, "vae_name": vae, "weight_dtype": "default"}},
        "2": {"class_type": "Qwen3AdapterTextEncode", "inputs": {"text": request.prompt, **prompt}},
        "3": {"class_type": "Qwen3AdapterTextEncode", "inputs": {"text": request.negative, **prompt}},
        "4": {"class_type": "AnimaEmptyLatent", "inputs": {
            "width": request.width, "height": request.height, "batch_size": request.batch}},
        "5": {"class_type": "AnimaModelSampling", "inputs": {"model": model, "shift": request.shift}},
        "6": {"class_type": "KSampler", "inputs": {
            "model": ["5", 0], "positive": ["2", 0], "negative": ["3", 0], "latent_image": ["4", 0],
            "seed": request.seed, "steps": request.steps, "cfg": request.cfg, "sampler_name": request.sampler,
            "scheduler": "simple", "denoise": request.denoise}},
        "7": {"class_type": "WanVAEDecode", "inputs": {"samples": ["6", 0], "vae": ["1", 2], "tile_size": 0}},
        "8": {"class_type": "SaveImage", "inputs": {"images": ["7", 0], "filename_prefix": "Anima"}},
    }  # fmt: skip


def parameters_text(request: Request, dit: str) -> str:
    """The `parameters` text that many picture tools read."""
    return (
        f"{request.prompt}\nNegative prompt: {request.negative}\n"
        f"Steps: {request.steps}, Sampler: {request.sampler}, Schedule type: simple, CFG scale: {request.cfg}, "
        f"Seed: {request.seed}, Size: {request.width}x{request.height}, Shift: {request.shift}, Model: {dit}"
    )


def save_png(image: Tensor, path: Path, graph: dict[str, Any], parameters: str) -> None:
    """Write a picture (H, W, 3) in [0, 1], whole or not at all, with its metadata."""
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    info = PngInfo()
    info.add_text("prompt", json.dumps(graph))
    info.add_text("parameters", parameters)
    pixels = (image * 255.0).clamp(0, 255).byte().numpy()  # truncated, as ComfyUI's SaveImage does
    partial = path.with_suffix(".partial")
    Image.fromarray(pixels).save(partial, format="PNG", pnginfo=info)
    partial.replace(path)
