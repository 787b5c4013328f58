"""Writing the demo model's three files in the real key layouts.

The package carries only what training changed (`weights.safetensors`): rows of the embedding tables that no
caption uses, the frozen random text encoder, and what a single image never reaches in a video VAE are filled in
here by a fixed rule, the same on every machine.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..config import AdapterConfig, AnimaConfig
from ..text.qwen3 import qwen3_shapes
from ..vae import VAEConfig, WanImageVAE

WEIGHTS = Path(__file__).with_name("weights.safetensors")

ADAPTER_CONFIG = AdapterConfig(source_dim=128, model_dim=128, target_dim=128, num_blocks=2, head_dim=64, mlp_dim=512)
DIT_CONFIG = AnimaConfig(
    model_dim=192, num_blocks=5, head_dim=48, mlp_dim=768, context_dim=128, adaln_lora_dim=32,
    adapter=ADAPTER_CONFIG,
)  # fmt: skip
VAE_CONFIG = VAEConfig(dim=8)
QWEN_DIMENSIONS = {
    "vocab_size": 151936, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128,
}  # fmt: skip


def rule(name: str, shape: tuple[int, ...], std: float = 1.0) -> Tensor:
    """Fixed pseudo-random float32 values (uniform, of standard deviation `std`) for a tensor's name and shape.

    Integer hashing (splitmix64), so every platform and library version gives the same bits.
    """
    count = int(np.prod(shape, dtype=np.int64))
    state = np.arange(count, dtype=np.uint64) + np.uint64(zlib.crc32(name.encode()) << 32)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state ^= state >> np.uint64(shift)
        state *= np.uint64(factor)
    state ^= state >> np.uint64(31)
    uniform = (state >> np.uint64(40)).astype(np.float32) / np.float32(2**24) - np.float32(0.5)
    return torch.from_numpy(uniform.reshape(shape) * np.float32(std * 12**0.5))


def text_encoder_tensors() -> dict[str, Tensor]:
    """The frozen random Qwen3, complete, bfloat16, named `model.*`."""

    def fill(name: str, shape: tuple[int, ...]) -> Tensor:
        if len(shape) == 1:
            return torch.ones(shape)
        return rule(name, shape, 1.0 if "embed" in name else shape[1] ** -0.5)

    return {name: fill(name, shape).bfloat16() for name, shape in qwen3_shapes(QWEN_DIMENSIONS).items()}


def t5_table(used: Tensor, rows: Tensor) -> Tensor:
    """The adapter's embedding table: trained rows where captions use them, the rule elsewhere."""
    table = rule("llm_adapter.embed.weight", (ADAPTER_CONFIG.vocab_size, ADAPTER_CONFIG.target_dim)).to(rows.dtype)
    table[used.long()] = rows
    return table


def dit_tensors(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The DiT with its adapter, named `net.*` as in the original release."""
    inner = {k.removeprefix("dit."): v for k, v in weights.items() if k.startswith("dit.")}
    table = t5_table(weights["t5_used"], inner.pop("llm_adapter.embed.rows"))
    return {"net." + key: tensor for key, tensor in {**inner, "llm_adapter.embed.weight": table}.items()}


def vae_tensors(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The VAE in original Wan keys: 2-D kernels become the last slice of 3-D ones, the rest is zero."""
    out: dict[str, Tensor] = {}
    for name, tensor in ((k.removeprefix("vae."), v) for k, v in weights.items() if k.startswith("vae.")):
        if name.endswith(".gamma"):
            tensor = tensor if ".middle.1." in name else tensor.unsqueeze(-1)
        elif tensor.ndim == 4 and not any(part in name for part in (".resample.", "to_qkv", ".proj.")):
            depth = 3 if tensor.shape[-1] == 3 else 1
            video = tensor.new_zeros((*tensor.shape[:2], depth, *tensor.shape[2:]))
            video[:, :, -1] = tensor
            tensor = video
        out[name] = tensor.contiguous()
    return out | _time_convolutions(out)


def _time_convolutions(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Zero temporal convolutions where Wan has them: the last two downsamplers, the first two upsamplers."""
    out = {}
    stages = {
        "encoder.downsamples": (5, 8, 1),
        "decoder.upsamples": (3, 7, 2),
    }
    for stage, (*indices, factor) in stages.items():
        for index in indices:
            dim = tensors[f"{stage}.{index}.resample.1.weight"].shape[1]
            out[f"{stage}.{index}.time_conv.weight"] = torch.zeros(dim * factor, dim, 3, 1, 1, dtype=torch.bfloat16)
            out[f"{stage}.{index}.time_conv.bias"] = torch.zeros(dim * factor, dtype=torch.bfloat16)
    return out


FILES: dict[str, tuple[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]]] = {
    "diffusion_models": ("anima_demo.safetensors", dit_tensors),
    "text_encoders": ("qwen3_demo.safetensors", lambda _: text_encoder_tensors()),
    "vae": ("wan_vae_demo.safetensors", vae_tensors),
}


def write_demo_model(models_dir: str | Path) -> list[Path]:
    """Write the demo files below a ComfyUI `models` folder; files that are already there are kept.

    Returns:
        The paths of the DiT, the text encoder and the VAE.
    """
    from safetensors.torch import load_file, save_file

    paths = []
    for folder, (name, build) in FILES.items():
        path = Path(models_dir) / folder / name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(".partial")
            save_file(build(load_file(WEIGHTS)), partial, {"title": "Anima demo model (draws coloured shapes)"})
            partial.replace(path)
        paths.append(path)
    return paths


def new_vae() -> WanImageVAE:
    """An untrained demo VAE."""
    return WanImageVAE(VAE_CONFIG)
