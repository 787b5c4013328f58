"""Sorting a LoRA file: which tensor belongs to which module, and why the rest belongs nowhere."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from ..config import Shape
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


def shape_problem(module: Module, shape: Shape) -> str | None:
    """Why a module does not fit a weight of this shape, or None when it does."""
    if missing := _missing_parts(module):
        return f"incomplete, without {', '.join(missing)}"
    for suffix in (".alpha", ".on_input"):
        if suffix in module and module[suffix].numel() != 1:
            return f"{suffix} has shape {list(module[suffix].shape)} instead of being one number"
    up, down = module.get(".lora_up.weight"), module.get(".lora_down.weight")
    if up is not None and down is not None and (up.ndim < 2 or down.ndim < 2 or up.shape[1] != down.shape[0]):
        return f"ranks differ: up {list(up.shape)}, down {list(down.shape)}"
    made = _made_shape(module, shape)
    if made != shape:
        return f"shape {list(made)} does not fit the model's {list(shape)}"
    if ".dora_scale" in module and module[".dora_scale"].numel() not in shape:
        return f"DoRA magnitudes {list(module['.dora_scale'].shape)} do not fit the model's {list(shape)}"
    return None


_FAMILIES = (
    (".lora_up.weight", ".lora_down.weight"),
    (".hada_w1_a", ".hada_w1_b", ".hada_w2_a", ".hada_w2_b"),
    (".a1.weight", ".a2.weight", ".b1.weight", ".b2.weight"),
    (".lokr_w1_a", ".lokr_w1_b"),
    (".lokr_w2_a", ".lokr_w2_b"),
    (".weight", ".on_input"),
)
"""Tensors that come together or not at all."""


def _missing_parts(module: Module) -> list[str]:
    for family in _FAMILIES:
        have = [name for name in family if name in module]
        if have and len(have) < len(family):
            return [name for name in family if name not in module]
    factors = [any(name in module for name in (f".lokr_w{i}", f".lokr_w{i}_a")) for i in (1, 2)]
    if any(factors) and not all(factors):
        return [".lokr_w1" if factors[1] else ".lokr_w2"]
    carriers = [name for name in module if name not in (".alpha", ".dora_scale", ".rescale", ".scalar")]
    return [] if carriers else ["anything but scales"]


def _made_shape(module: Module, shape: Shape) -> Shape:
    """The shape a module changes; (0, 0) when its parts do not fit each other."""

    def product(a: str, b: str) -> Shape:
        first, second = module[a], module[b]
        inner = first.ndim == second.ndim == 2 and first.shape[1] == second.shape[0]
        return (first.shape[0], second.shape[1]) if inner else (0, 0)

    for suffix in (".diff", ".w_norm", ".set_weight"):
        if suffix in module:
            return tuple(module[suffix].shape)
    if ".lora_up.weight" in module:
        return (module[".lora_up.weight"].shape[0], module[".lora_down.weight"][0].numel())
    if ".hada_w1_a" in module:
        one, two = product(".hada_w1_a", ".hada_w1_b"), product(".hada_w2_a", ".hada_w2_b")
        return one if one == two else (0, 0)
    if ".lokr_w1" in module or ".lokr_w1_a" in module:
        one, two = (
            tuple(module[f".lokr_w{i}"].shape) if f".lokr_w{i}" in module else product(f".lokr_w{i}_a", f".lokr_w{i}_b")
            for i in (1, 2)
        )
        return (one[0] * two[0], one[1] * two[1]) if len(one) == len(two) == 2 else (0, 0)
    if ".b1.weight" in module:
        fits = product(".a1.weight", ".a2.weight") == (shape[-1], shape[-1])
        return product(".b1.weight", ".b2.weight") if fits else (0, 0)
    if ".oft_blocks" in module:
        blocks = module[".oft_blocks"]
        square = blocks.ndim in (3, 4) and blocks.shape[-1] == blocks.shape[-2]
        return (blocks.shape[-3] * blocks.shape[-1], *shape[1:]) if square else (0, 0)
    if ".on_input" in module:
        axis = 1 if bool(module[".on_input"]) else 0
        return shape if len(shape) == 2 and module[".weight"].numel() == shape[axis] else (0, 0)
    return shape


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
