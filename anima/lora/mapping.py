"""Sorting a LoRA file: which tensor belongs to which module, and why the rest belongs nowhere."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from ..errors import InputError, WrongKindError, shorten
from .names import TEXT_PREFIXES, NameTable, split_suffix

STANDARD_SUFFIX = {
    ".lora_A.weight": ".lora_down.weight", ".lora_A.default.weight": ".lora_down.weight",
    ".lora_a.weight": ".lora_down.weight", ".lora_linear_layer.down.weight": ".lora_down.weight",
    "_lora.down.weight": ".lora_down.weight", ".lora.down.weight": ".lora_down.weight",
    ".lora_B.weight": ".lora_up.weight", ".lora_B.default.weight": ".lora_up.weight",
    ".lora_b.weight": ".lora_up.weight", ".lora_linear_layer.up.weight": ".lora_up.weight",
    "_lora.up.weight": ".lora_up.weight", ".lora.up.weight": ".lora_up.weight",
    ".lora_magnitude_vector": ".dora_scale", ".lora_magnitude_vector.default.weight": ".dora_scale",
    ".oft_R.default.weight": ".oft_R.weight",
}  # fmt: skip
"""Spellings of the same tensor -> the one ComfyUI's weight adapters read everywhere."""

_TEXT_MARKS = tuple(prefix for prefix in TEXT_PREFIXES if "te" in prefix)
"""Prefixes that name the text encoder; the others may stand before a DiT module too."""
_FUSED = ("q_proj", "k_proj", "v_proj")

Module = dict[str, Tensor]
"""Standard suffix -> tensor, of one module."""


@dataclass
class SortedLora:
    """Tensors by module path, for the DiT (with its adapter) and the text encoder; `unknown` names the rest."""

    dit: dict[str, Module] = field(default_factory=dict)
    text: dict[str, Module] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    total: int = 0

    def groups(self) -> Counter[str]:
        """Number of tensors per group: DiT, adapter, text encoder."""
        counts: Counter[str] = Counter()
        for path, module in self.dit.items():
            counts["LLM adapter" if path.startswith("llm_adapter.") else "DiT"] += len(module)
        counts["text encoder"] = sum(map(len, self.text.values()))
        return counts


def sort_lora(
    tensors: Mapping[str, Tensor],
    dit: NameTable,
    text: NameTable,
    metadata: Mapping[str, str] | None = None,
) -> SortedLora:
    """Assign every tensor of a LoRA file to a module.

    Args:
        tensors: As in the file.
        dit, text: Tables of the models' names.
        metadata: The file's metadata; PEFT's `use_rslora` is honoured, LyCORIS' is not (its alpha has it already).
    """
    out = SortedLora(total=len(tensors))
    for key, tensor in tensors.items():
        split = split_suffix(key)
        if split is None:
            out.unknown.append(key)
            continue
        name, suffix = split
        suffix = STANDARD_SUFFIX.get(suffix, suffix)
        path = None if name.startswith(_TEXT_MARKS) else dit.resolve(name)
        if path is not None:
            out.dit.setdefault(path, {})[suffix] = tensor
        elif (path := text.resolve(name)) is not None:
            out.text.setdefault(path, {})[suffix] = tensor
        else:
            out.unknown.append(key)
    out.dit = _split_fused(out.dit)
    if _peft_rank_stabilised(metadata or {}):
        for module in (*out.dit.values(), *out.text.values()):
            _stabilise(module)
    return out


def _split_fused(modules: dict[str, Module]) -> dict[str, Module]:
    """A LoRA on a fused `qkv` becomes three that share their down projection."""
    out: dict[str, Module] = {}
    for path, module in modules.items():
        if not path.endswith(".qkv"):
            out[path] = module
            continue
        for index, projection in enumerate(_FUSED):
            out[path.removesuffix("qkv") + projection] = {
                suffix: tensor.chunk(3)[index] if suffix in (".lora_up.weight", ".diff", ".dora_scale") else tensor
                for suffix, tensor in module.items()
            }
    return out


def _peft_rank_stabilised(metadata: Mapping[str, str]) -> bool:
    for value in metadata.values():
        if "use_rslora" not in value:
            continue
        try:
            config = json.loads(value)
        except (ValueError, RecursionError):
            continue
        flags = [config, *config.values()] if isinstance(config, dict) else []
        if any(isinstance(flag, dict) and flag.get("use_rslora") is True for flag in flags):
            return True
    return False


def _stabilise(module: Module) -> None:
    """Turn PEFT's rank-stabilised scale alpha / sqrt(rank) into an alpha for the usual alpha / rank."""
    down, alpha = module.get(".lora_down.weight"), module.get(".alpha")
    if down is not None:
        rank = down.shape[0]
        module[".alpha"] = (alpha if alpha is not None else down.new_tensor(float(rank))).float() * math.sqrt(rank)


def check_lora(tensors: Mapping[str, Tensor], file: str, kind_slug: str, kind_name: str) -> None:
    """Refuse files that cannot be Anima LoRAs.

    Raises:
        WrongKindError: a LoRA of another base model, or no LoRA at all.
        InputError: not-a-number or infinite values.
    """
    if kind_slug not in ("lora_anima", "lora_other"):
        raise WrongKindError(
            "This is not a LoRA for Anima.", file=file, found=kind_name, expected="a LoRA trained on Anima",
            fix="Choose a LoRA whose base model is Anima.",
        )  # fmt: skip
    broken = [name for name, t in tensors.items() if t.is_floating_point() and not t.float().isfinite().all()]
    if broken:
        raise InputError(
            "The LoRA holds values that are not numbers; it would turn the picture black.",
            file=file, found=shorten(broken), expected="finite values", fix="Train or download it again.",
        )  # fmt: skip
