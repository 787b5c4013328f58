"""Decoding and encoding of single images through the 2-D VAE; videos go the host's way."""

from __future__ import annotations

import logging
from typing import Any

import comfy.ldm.wan.vae
import comfy.model_management
import comfy.utils
import torch
from comfy_api.latest import io
from torch import Tensor

from ..anima.errors import InputError
from ..anima.vae import LATENT_CHANNELS, SPATIAL_FACTOR, WanImageVAE, load_image_vae

CATEGORY = "Anima/latent"
TILE_SIZES = (2048, 1024, 512, 256)
"""Image pixels on a side; tiling is exact, so smaller tiles only cost time."""

_log = logging.getLogger("anima")


class WanVAEDecode(io.ComfyNode):
    """Latent -> image."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanVAEDecode",
            display_name="Anima VAE Decode",
            category=CATEGORY,
            description="Decodes latents with any Wan 2.1 / Qwen-Image VAE, faster than the video path and in tiles "
            "without seams when memory is short.",
            search_aliases=["anima", "vae decode", "wan", "latent to image", "tiled"],
            inputs=[
                io.Latent.Input("samples", tooltip="The latent to decode: 16 channels."),
                io.Vae.Input("vae", tooltip="A Wan 2.1 / Qwen-Image VAE, from AnimaVAELoader or VAELoader."),
                _tile_input(),
            ],
            outputs=[io.Image.Output(display_name="image", tooltip="The decoded pictures.")],
        )

    @classmethod
    def execute(cls, samples: dict[str, Any], vae: Any, tile_size: int = 0) -> io.NodeOutput:
        require_wan_vae(vae)
        latent = samples["samples"]
        if latent.ndim not in (4, 5) or latent.shape[1] != LATENT_CHANNELS:
            raise InputError(
                "The latent does not fit the Wan VAE.",
                found=f"shape {list(latent.shape)}",
                expected=f"{LATENT_CHANNELS} channels in the second place",
                fix="Use the latent of an Anima sampler, or encode the picture with WanVAEEncode.",
            )
        if latent.ndim == 5 and latent.shape[2] > 1:
            return io.NodeOutput(vae.decode(latent).flatten(0, 1))
        return io.NodeOutput(
            decode_images(vae, latent.reshape(latent.shape[0], LATENT_CHANNELS, *latent.shape[-2:]), tile_size)
        )


class WanVAEEncode(io.ComfyNode):
    """Image -> latent."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanVAEEncode",
            display_name="Anima VAE Encode",
            category=CATEGORY,
            description="Encodes pictures with any Wan 2.1 / Qwen-Image VAE, each picture on its own.",
            search_aliases=["anima", "vae encode", "wan", "image to latent", "img2img"],
            inputs=[
                io.Image.Input("pixels", tooltip="The pictures to encode; sides are cropped to multiples of 8."),
                io.Vae.Input("vae", tooltip="A Wan 2.1 / Qwen-Image VAE, from AnimaVAELoader or VAELoader."),
                _tile_input(),
            ],
            outputs=[io.Latent.Output(display_name="latent", tooltip="For KSampler's latent_image.")],
        )

    @classmethod
    def execute(cls, pixels: Tensor, vae: Any, tile_size: int = 0) -> io.NodeOutput:
        require_wan_vae(vae)
        return io.NodeOutput({"samples": encode_images(vae, pixels, tile_size)})


def _tile_input() -> io.Int.Input:
    return io.Int.Input(
        "tile_size", default=0, min=0, max=8192, step=64, optional=True, advanced=True,
        tooltip="Side of a tile in pixels. 0 chooses by free memory. Tiles leave no seams, they only cost time.",
    )  # fmt: skip


def require_wan_vae(vae: Any) -> None:
    """Raise InputError unless `vae` is a ComfyUI VAE object around a Wan 2.1 VAE."""
    if vae is None:
        raise InputError("There is no VAE.", found="nothing at 'vae'", fix="Connect AnimaVAELoader.")
    model = getattr(vae, "first_stage_model", None)
    if type(model) is not comfy.ldm.wan.vae.WanVAE or vae.latent_channels != LATENT_CHANNELS:
        raise InputError(
            "This VAE is not the one Anima uses.",
            found=f"{type(model).__name__} with {getattr(vae, 'latent_channels', '?')} latent channels",
            expected="the Wan 2.1 / Qwen-Image VAE (16 channels)",
            fix="Load qwen_image_vae.safetensors with AnimaVAELoader.",
        )


def _image_vae(vae: Any, memory: float) -> WanImageVAE:
    """Our 2-D VAE on the weights of the host's VAE object, on the device where the host would run it."""
    comfy.model_management.load_models_gpu([vae.patcher], memory_required=memory)
    tensors = {
        name: tensor.to(device=vae.device, dtype=vae.vae_dtype)
        for name, tensor in vae.first_stage_model.state_dict().items()
    }
    return load_image_vae(tensors)


def _choose_tile(vae: Any, memory_of: Any, height: int, width: int, tile_size: int) -> int | None:
    """The tile side in image pixels: what was asked for, or the largest that fits into free memory."""
    if tile_size:
        return max(tile_size // SPATIAL_FACTOR * SPATIAL_FACTOR, SPATIAL_FACTOR)
    free = comfy.model_management.get_free_memory(vae.device)
    if memory_of(height, width) <= free:
        return None
    fitting = [side for side in TILE_SIZES if memory_of(side, side) <= free]
    return fitting[0] if fitting else TILE_SIZES[-1]


def _with_fallback(run: Any, tile: int | None, what: str) -> Tensor:
    """Run with a tile size; on out-of-memory go to smaller tiles before giving up."""
    attempts = [tile, *(side for side in TILE_SIZES if tile is None or side < tile)]
    for attempt in attempts[:-1]:
        try:
            return run(attempt)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            _log.warning("Anima: out of memory in VAE %s, trying smaller tiles.", what)
        comfy.model_management.soft_empty_cache()
    return run(attempts[-1])


def is_out_of_memory(error: Exception) -> bool:
    """Whether the host counts this exception as out of memory."""
    return isinstance(error, comfy.model_management.OOM_EXCEPTION)


def decode_images(vae: Any, latent: Tensor, tile_size: int = 0) -> Tensor:
    """Decode (B, 16, h, w) to images (B, 8h, 8w, 3) in [0, 1], picture by picture."""
    height, width = latent.shape[-2] * SPATIAL_FACTOR, latent.shape[-1] * SPATIAL_FACTOR

    def memory_of(h: int, w: int) -> float:
        return vae.memory_used_decode((1, LATENT_CHANNELS, 1, h // SPATIAL_FACTOR, w // SPATIAL_FACTOR), vae.vae_dtype)

    model = _image_vae(vae, memory_of(height, width))  # makes room first, so that the choice sees it
    tile = _choose_tile(vae, memory_of, height, width, tile_size)

    def run(tile: int | None) -> Tensor:
        progress = _Progress(latent.shape[0], height, width, tile)
        pictures = [
            model.decode(
                sample.to(device=vae.device, dtype=vae.vae_dtype), tile and tile // SPATIAL_FACTOR, progress.step
            ).to(device=vae.output_device, dtype=torch.float32)
            for sample in latent.split(1)
        ]
        return vae.process_output(torch.cat(pictures))

    return _with_fallback(run, tile, "decode").movedim(1, -1)


def encode_images(vae: Any, pixels: Tensor, tile_size: int = 0) -> Tensor:
    """Encode images (B, H, W, C) in [0, 1] to latents (B, 16, 1, H/8, W/8), picture by picture."""
    pixels = vae.vae_encode_crop_pixels(pixels).movedim(-1, 1)
    height, width = pixels.shape[-2:]

    def memory_of(h: int, w: int) -> float:
        return vae.memory_used_encode((1, 3, 1, h, w), vae.vae_dtype)

    model = _image_vae(vae, memory_of(height, width))  # makes room first, so that the choice sees it
    tile = _choose_tile(vae, memory_of, height, width, tile_size)

    def run(tile: int | None) -> Tensor:
        progress = _Progress(pixels.shape[0], height, width, tile)
        latents = [
            model.encode(vae.process_input(image).to(device=vae.device, dtype=vae.vae_dtype), tile, progress.step)
            .to(device=vae.output_device, dtype=torch.float32)
            for image in pixels.split(1)
        ]  # fmt: skip
        return torch.cat(latents).unsqueeze(2)

    return _with_fallback(run, tile, "encode")


class _Progress:
    """A progress bar over all tiles of all pictures; each step honours the interrupt button."""

    def __init__(self, pictures: int, height: int, width: int, tile: int | None):
        rows, columns = (1, 1) if tile is None else (-(-height // tile), -(-width // tile))
        self._bar = comfy.utils.ProgressBar(pictures * rows * columns)

    def step(self) -> None:
        comfy.model_management.throw_exception_if_processing_interrupted()
        self._bar.update(1)
