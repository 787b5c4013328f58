"""LoRA files to other spellings, into checkpoints, and out of the difference of two checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor

from ..checkpoint.dit import expected_shapes, plan_dit
from ..checkpoint.layouts import canonical_to_diffusers
from ..checkpoint.writer import Planned, write_safetensors
from ..config import AnimaConfig
from ..convert import DTYPES, planned_tensors
from ..errors import InputError
from ..text.qwen3 import qwen3_shapes
from .arithmetic import Module, patched_weight
from .files import LoraFile, module_weights, parse_lora_argument, read_lora, report, sort_for
from .mapping import SortedLora, sort_lora
from .names import NameTable, dit_names, flatten, text_encoder_names

SPELLINGS = ("kohya", "comfyui", "diffusers")
"""kohya: lora_unet_..., for ComfyUI and sd-scripts; comfyui: diffusion_model....; diffusers: PEFT's names."""
DEEPEST = 64

_PEFT = {".lora_down.weight": ".lora_A.weight", ".lora_up.weight": ".lora_B.weight"}
_QWEN = {"vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
         "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}  # fmt: skip


@lru_cache(maxsize=1)
def _tables() -> tuple[NameTable, NameTable]:
    deep = expected_shapes(replace(AnimaConfig(), num_blocks=DEEPEST))
    dit = [n.removesuffix(".weight") for n in deep if n.endswith(".weight")]
    text = [n.removeprefix("model.").removesuffix(".weight") for n in qwen3_shapes(_QWEN)]
    return dit_names(dit), text_encoder_names(text)


def sort_by_name(lora: LoraFile) -> SortedLora:
    """Assign a file's tensors to modules without a model at hand, for any depth."""
    dit, text = _tables()
    return sort_lora(lora.tensors, dit, text, lora.metadata)


def inspect_lora(path: str | PathLike[str]) -> dict[str, object]:
    """What a LoRA file changes: groups, ranks, kinds, names that are not Anima's."""
    lora = read_lora(path)
    found = sort_by_name(lora)
    modules = [*found.dit.values(), *found.text.values()]
    ranks = sorted({m[".lora_down.weight"].shape[0] for m in modules if ".lora_down.weight" in m})
    blocks = {int(p.split(".")[1]) for p in found.dit if p.startswith("blocks.")}
    return {
        "file": lora.path, "tensors": found.total, "groups": dict(found.groups()), "ranks": ranks,
        "blocks": f"{min(blocks)}-{max(blocks)}" if blocks else "none",
        "suffixes": sorted({suffix for m in modules for suffix in m}), "unknown": found.unknown, "metadata": lora.metadata,
    }  # fmt: skip


def convert_lora(source: str | PathLike[str], target: Path, spelling: str, force: bool = False) -> list[str]:
    """Write a LoRA under other names.

    Returns:
        Names that are not Anima's, which are left out.

    Raises:
        InputError: no such spelling, or diffusers' names for a kind that PEFT does not have.
    """
    if spelling not in SPELLINGS:
        raise InputError("No such spelling.", found=spelling, expected=", ".join(SPELLINGS))
    lora = read_lora(source)
    found = sort_by_name(lora)
    out: dict[str, Tensor] = {}
    for path, module in found.dit.items():
        out |= _spelled(path, module, spelling, text=False)
    for path, module in found.text.items():
        out |= _spelled(path, module, spelling, text=True)
    _write(target, out, {**lora.metadata, "format": "pt"}, force)
    return found.unknown


def _spelled(path: str, module: Module, spelling: str, text: bool) -> dict[str, Tensor]:
    if spelling == "kohya":
        return {("lora_te_" if text else "lora_unet_") + flatten(path) + suffix: t for suffix, t in module.items()}
    if spelling == "comfyui":
        prefix = "text_encoders.qwen3_06b.transformer.model." if text else "diffusion_model."
        return {prefix + path + _PEFT.get(suffix, suffix): t for suffix, t in module.items()}
    if not set(module) <= {".lora_up.weight", ".lora_down.weight", ".alpha"}:
        raise InputError("PEFT has no names for this kind of LoRA.", found=f"{path}: {', '.join(sorted(module))}")
    name = "text_encoder." + path if text else canonical_to_diffusers(path) or path
    prefix = "" if text or name.startswith("text_conditioner.") else "transformer."
    down, up = module[".lora_down.weight"], module[".lora_up.weight"]
    scale = float(module.get(".alpha", torch.tensor(float(down.shape[0])))) / down.shape[0]
    return {f"{prefix}{name}.lora_A.weight": down, f"{prefix}{name}.lora_B.weight": (up.float() * scale).to(up.dtype)}


def _write(target: Path, tensors: dict[str, Tensor], metadata: dict[str, str], force: bool) -> None:
    planned = {n: Planned(t.dtype, tuple(t.shape), partial(tensors.__getitem__, n)) for n, t in tensors.items()}
    write_safetensors(target, planned, metadata, force=force)


def merge_loras(
    dit: str | PathLike[str],
    loras: Sequence[str],
    target: Path,
    *,
    dtype: str | None = None,
    force: bool = False,
    on_bytes: Callable[[int], None] | None = None,
) -> list[str]:
    """Write a DiT with LoRAs merged in, tensor by tensor, in the original layout.

    Args:
        loras: `FILE[:strength]` each.
        dtype: `bf16`, `fp16`, `fp32`, or None to keep each tensor's own.

    Returns:
        A report for each LoRA.
    """
    plan = plan_dit(dit)
    tensors = planned_tensors(plan, DTYPES[dtype] if dtype else None)
    weights = module_weights(tensors)
    reports, changes = [], []
    for argument in loras:
        path, strength = parse_lora_argument(argument)
        lora = read_lora(path)
        applied, problems = sort_for(lora, weights, {})
        changes.append((applied.dit, strength))
        reports.append(report(lora, applied, problems))

    def changed(name: str, planned: Planned) -> Planned:
        def read() -> Tensor:
            tensor = planned.read()
            module_path, _, parameter = name.rpartition(".")
            for modules, strength in changes:
                module = modules.get(module_path, {})
                if parameter == "weight" and set(module) - {".diff_b", ".b_norm"}:
                    tensor = patched_weight(tensor.to(torch.float32), module, strength)
                elif parameter == "bias":
                    for suffix in {".diff_b", ".b_norm"} & set(module):
                        tensor = tensor.float() + strength * module[suffix].float()
            return tensor

        return replace(planned, read=read)

    write_safetensors(
        target,
        {"net." + n: changed(n, t) for n, t in tensors.items()},
        {"format": "pt"},
        force=force,
        on_bytes=on_bytes,
    )
    return reports


def extract_lora(
    base: str | PathLike[str],
    tuned: str | PathLike[str],
    target: Path,
    rank: int,
    *,
    force: bool = False,
    on_tensor: Callable[[int, int], None] | None = None,
) -> float:
    """Write the difference of two DiTs as a LoRA of a rank (kohya's names); vectors go as full differences.

    Returns:
        The relative error over all matrices: what the rank could not hold.

    Raises:
        InputError: the two differ in architecture, or not at all.
    """
    first, second = planned_tensors(plan_dit(base), torch.float32), planned_tensors(plan_dit(tuned), torch.float32)
    if {n: t.shape for n, t in first.items()} != {n: t.shape for n, t in second.items()}:
        raise InputError("The two models differ in depth or width.", file=tuned, expected=f"the dimensions of {base}")
    out: dict[str, Tensor] = {}
    lost = total = 0.0
    for index, (name, planned) in enumerate(first.items()):
        difference = second[name].read().float() - planned.read().float()
        key = "lora_unet_" + flatten(name.rpartition(".")[0])
        if difference.any():
            if difference.ndim == 2 and min(difference.shape) > rank:
                up, down = low_rank(difference, rank)
                out |= {
                    f"{key}.lora_up.weight": up,
                    f"{key}.lora_down.weight": down,
                    f"{key}.alpha": torch.tensor(float(rank)),
                }
                lost += float((difference - up @ down).square().sum())
            else:
                out[key + (".diff_b" if name.endswith(".bias") else ".diff")] = difference
            total += float(difference.square().sum())
        if on_tensor is not None:
            on_tensor(index + 1, len(first))
    if not out:
        raise InputError("The two models are the same.", file=tuned)
    _write(target, {n: t.contiguous() for n, t in out.items()}, {"format": "pt"}, force)
    return (lost / total) ** 0.5


def low_rank(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The best factors (out, rank) and (rank, in) of a matrix, by SVD (randomised where that is much cheaper)."""
    if rank * 8 < min(matrix.shape):
        torch.manual_seed(0)
        u, s, v = torch.svd_lowrank(matrix, q=rank + 16, niter=6)
        vh = v.T
    else:
        u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    root = s[:rank].sqrt()
    return u[:, :rank] * root, root[:, None] * vh[:rank]
