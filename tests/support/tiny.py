"""Tiny random checkpoints in the real key layouts."""

from __future__ import annotations

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
