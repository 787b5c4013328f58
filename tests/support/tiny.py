"""Tiny random checkpoints in the real key layouts."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from anima.config import AdapterConfig, AnimaConfig
from anima.demo.files import vae_tensors
from anima.text.qwen3 import qwen3_shapes
from anima.transformer import AnimaTransformer
from anima.vae import VAEConfig, WanImageVAE

CONFIG = AnimaConfig(
    model_dim=96, num_blocks=3, head_dim=48, mlp_dim=384, context_dim=48, adaln_lora_dim=16,
    adapter=AdapterConfig(source_dim=64, model_dim=32, target_dim=48, num_blocks=2, head_dim=16, mlp_dim=128),
)  # fmt: skip
QWEN = {
    "vocab_size": 151936, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128,
}  # fmt: skip
VAE = VAEConfig(dim=8)


def random_tensors(shapes: dict[str, tuple[int, ...]], seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Random weights of a sensible size: matrices 1/sqrt(fan-in), gains near 1."""
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        if "norm" in name or name.endswith("gamma"):
            tensor = 1 + 0.1 * noise
        elif "embed" in name and "x_embedder" not in name and "t_embedder" not in name:
            tensor = noise
        else:
            tensor = noise * (1.5 / max(1, noise[0].numel()) ** 0.5 if noise.ndim > 1 else 0.1)
        out[name] = tensor.to(dtype)
    return out


def module_shapes(module: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


def dit(config: AnimaConfig = CONFIG, seed: int = 1, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Canonical names, no prefix."""
    return random_tensors(module_shapes(AnimaTransformer(config, device="meta")), seed, dtype)


def text_encoder(seed: int = 2, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Names below `model.`."""
    return random_tensors(qwen3_shapes(QWEN), seed, dtype)


def vae(seed: int = 3, dtype: torch.dtype = torch.float32, config: VAEConfig = VAE) -> dict[str, Tensor]:
    """Original Wan names; kernels before the last temporal slice are random too, as in the real file."""
    with torch.device("meta"):
        image = WanImageVAE(config)
    flat = random_tensors(module_shapes(image), seed, dtype)
    tensors = vae_tensors({"vae." + name: tensor for name, tensor in flat.items()})
    generator = torch.Generator().manual_seed(seed + 1000)
    for name, tensor in tensors.items():
        if tensor.ndim == 5 and tensor.shape[2] == 3:
            early = 0.1 * torch.randn(tensor[:, :, :-1].shape, generator=generator)
            tensor[:, :, :-1] = early.to(tensor.dtype)
        tensors[name] = tensor.to(dtype)
    return tensors


def lllite(channels: int) -> dict[str, Tensor]:
    """A control model in ComfyUI's named-key layout for the tiny DiT (width 96)."""
    generator = torch.Generator().manual_seed(channels)
    dim, emb, mlp = 16, 12, 8

    def rand(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) / max(1, math.prod(shape[1:])) ** 0.5

    c = "lllite_conditioning1."
    out = {
        c + "conv1.weight": rand(dim // 2, channels, 4, 4), c + "conv1.bias": rand(dim // 2),
        c + "conv2.weight": rand(dim // 2, dim // 2, 3, 3), c + "conv2.bias": rand(dim // 2),
        c + "conv3.weight": rand(dim, dim // 2, 4, 4), c + "conv3.bias": rand(dim),
        c + "proj.weight": rand(emb, dim, 1, 1), c + "proj.bias": rand(emb),
        c + "out_norm.weight": torch.ones(emb), c + "out_norm.bias": torch.zeros(emb),
    }  # fmt: skip
    for norm, width in (("norm1", dim // 2), ("norm2", dim // 2), ("norm3", dim)):
        out |= {f"{c}{norm}.weight": torch.ones(width), f"{c}{norm}.bias": torch.zeros(width)}
    for block in range(3):
        for target in ("self_attn_q_proj", "self_attn_v_proj", "cross_attn_q_proj", "mlp_layer1"):
            name = f"lllite_dit_blocks_{block}_{target}."
            out |= {
                name + "down.weight": rand(mlp, 96), name + "down.bias": rand(mlp),
                name + "mid.weight": rand(mlp, mlp + emb), name + "mid.bias": rand(mlp),
                name + "cond_to_film.weight": rand(2 * mlp, emb), name + "cond_to_film.bias": rand(2 * mlp),
                name + "up.weight": rand(96, mlp), name + "up.bias": rand(96), name + "depth_embed": rand(emb),
            }  # fmt: skip
    return out


def prefixed(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {prefix + name: tensor for name, tensor in tensors.items()}


def write_models(models: Path, dtype: torch.dtype = torch.float32, name: str = "tiny") -> None:
    """The three files below a ComfyUI models folder, as `tiny.safetensors` each."""
    files = {
        "diffusion_models": prefixed(dit(dtype=dtype), "net."),
        "text_encoders": text_encoder(dtype=dtype),
        "vae": vae(dtype=dtype),
    }
    for folder, tensors in files.items():
        (models / folder).mkdir(parents=True, exist_ok=True)
        save_file(tensors, models / folder / f"{name}.safetensors")
