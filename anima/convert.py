"""Converting a DiT between layouts and dtypes, tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor

from .checkpoint.dit import DitPlan, plan_dit
from .checkpoint.layouts import canonical_to_diffusers
from .checkpoint.sources import ShardedHeader
from .checkpoint.writer import Planned, write_safetensors
from .config import AnimaConfig
from .errors import InputError

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
STORED = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64,
          "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}  # fmt: skip

PREFIXES = {"original": "net.", "comfyui": "model.diffusion_model.", "bare": ""}
LAYOUTS = (*PREFIXES, "diffusers", "adapter")
"""`diffusers` writes a folder; `adapter` writes the LLM adapter alone."""


def convert_dit(
    source: str | PathLike[str],
    target: str | PathLike[str],
    layout: str,
    *,
    adapter: str | PathLike[str] | None = None,
    dtype: str | None = None,
    force: bool = False,
    on_bytes: Callable[[int], None] | None = None,
) -> list[Path]:
    """Write a DiT in another layout.

    Args:
        source: File, sharded index or diffusers folder.
        target: File, or folder for `diffusers`.
        layout: One of LAYOUTS.
        adapter: File whose adapter is merged in.
        dtype: `bf16`, `fp16`, `fp32`, or None to keep each tensor's own.
        force: Replace existing files.
        on_bytes: Progress, called with bytes written.

    Returns:
        The files written.
    """
    if layout not in LAYOUTS:
        raise InputError("No such layout.", found=layout, expected=", ".join(LAYOUTS))
    plan = plan_dit(source, adapter)
    if plan.quantisation not in ("none", "raw fp8"):
        raise InputError(
            "Quantised files are not converted.", file=source, found=plan.quantisation, expected="plain weights",
            fix="Convert the unquantised file.",
        )  # fmt: skip
    tensors = planned_tensors(plan, DTYPES[dtype] if dtype else None)
    target = Path(target)
    if layout == "diffusers":
        return _write_diffusers(tensors, plan.config, target, force, on_bytes)
    if layout == "adapter":
        tensors = {name: t for name, t in tensors.items() if name.startswith("llm_adapter.")}
    prefix = PREFIXES.get(layout, "")
    write_safetensors(
        target, {prefix + n: t for n, t in tensors.items()}, {"format": "pt"}, force=force, on_bytes=on_bytes
    )
    return [target]


def planned_tensors(plan: DitPlan, dtype: torch.dtype | None) -> dict[str, Planned]:
    """Canonical name -> tensor to be read, in the order of the files."""
    out = {}
    for source in plan.sources:
        header = source.header
        for key, name in source.rename.items():
            file = header.shard_of[key] if isinstance(header, ShardedHeader) else header.path
            info = header.tensors[key]
            out[name] = Planned(dtype or STORED[info.dtype], info.shape, _reader(file, key))
    return out


def _reader(file: Path, key: str) -> Callable[[], Tensor]:
    def read() -> Tensor:
        from safetensors import safe_open

        with safe_open(file, framework="pt") as opened:
            return opened.get_tensor(key)

    return read


def _write_diffusers(
    tensors: dict[str, Planned], config: AnimaConfig, folder: Path, force: bool, on_bytes: Callable[[int], None] | None
) -> list[Path]:
    parts: dict[str, dict[str, Planned]] = {"transformer": {}, "text_conditioner": {}}
    for name, tensor in tensors.items():
        module, dot, parameter = name.rpartition(".")
        new = canonical_to_diffusers(module)
        if new is None:
            raise InputError("A tensor has no diffusers name.", found=name)
        part = "text_conditioner" if new.startswith("text_conditioner.") else "transformer"
        parts[part][new.removeprefix("text_conditioner.") + dot + parameter] = tensor
    files = []
    for part, contents in parts.items():
        path = folder / part / "diffusion_pytorch_model.safetensors"
        write_safetensors(path, contents, {"format": "pt"}, force=force, on_bytes=on_bytes)
        (folder / part / "config.json").write_text(json.dumps(diffusers_config(part, config), indent=2) + "\n")
        files.append(path)
    return files


def diffusers_config(part: str, config: AnimaConfig) -> dict[str, object]:
    """What diffusers' config.json says of a model with these dimensions.

    Args:
        part: `transformer` or `text_conditioner`.
    """
    if part == "transformer":
        return {
            "_class_name": "CosmosTransformer3DModel", "in_channels": config.in_channels,
            "out_channels": config.out_channels, "num_attention_heads": config.num_heads,
            "attention_head_dim": config.head_dim, "num_layers": config.num_blocks,
            "mlp_ratio": config.mlp_dim / config.model_dim, "text_embed_dim": config.context_dim,
            "adaln_lora_dim": config.adaln_lora_dim, "max_size": [128, 240, 240], "patch_size": [1, 2, 2],
            "rope_scale": [config.rope_ratio_t, config.rope_ratio_h, config.rope_ratio_w],
            "concat_padding_mask": True, "extra_pos_embed_type": None,
        }  # fmt: skip
    adapter = config.adapter
    if adapter is None:
        raise InputError("The model has no LLM adapter.")
    return {
        "_class_name": "AnimaTextConditioner", "source_dim": adapter.source_dim, "target_dim": adapter.target_dim,
        "model_dim": adapter.model_dim, "num_layers": adapter.num_blocks, "num_attention_heads": adapter.num_heads,
        "mlp_ratio": adapter.mlp_dim / adapter.model_dim, "target_vocab_size": adapter.vocab_size,
    }  # fmt: skip
