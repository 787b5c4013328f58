"""LoRA files: reading them, and applying or merging them without ComfyUI."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..checkpoint.header import read_header
from ..checkpoint.kinds import identify
from ..checkpoint.writer import Planned
from ..errors import CheckpointError, InputError, shorten
from .arithmetic import Module, patched_weight
from .blocks import remap_blocks
from .mapping import SortedLora, check_lora, shape_problem, sort_lora
from .names import dit_names, text_encoder_names

Weight = TypeVar("Weight")


@dataclass(frozen=True)
class LoraFile:
    """A checked LoRA file's tensors and metadata."""

    path: str
    tensors: dict[str, Tensor]
    metadata: dict[str, str]


def read_lora(path: str | PathLike[str]) -> LoraFile:
    """Read a LoRA file.

    Raises:
        WrongKindError: another kind of file, or a LoRA of another base model.
        CheckpointError, InputError: damaged, or values that are not numbers.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    header = read_header(path)
    kind = identify(header.shapes)
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise CheckpointError("The LoRA file cannot be read.", file=path, found=str(error)) from error
    check_lora(tensors, str(path), kind.slug, kind.name)
    return LoraFile(str(path), tensors, header.metadata)


def sort_for(
    lora: LoraFile,
    dit: Mapping[str, Tensor | Planned],
    text: Mapping[str, Tensor | Planned],
    remap: Mapping[int, list[int]] | None = None,
) -> tuple[SortedLora, list[str]]:
    """Assign a file's tensors to modules, and leave out what does not fit.

    Args:
        dit, text: Module path -> weight of the models, of which only the shape is looked at.
        remap: The LoRA's block -> the model's blocks, for a model of another depth.

    Returns:
        What fits, and a line for each module or name that does not.

    Raises:
        InputError: nothing fits.
    """
    out = sort_lora(lora.tensors, dit_names(dit), text_encoder_names(text), lora.metadata)
    out.dit = {path: module for path, module in remap_blocks(out.dit, remap or {}).items() if path in dit}
    problems = [f"{name}: no such module" for name in out.unknown]
    for modules, weights in ((out.dit, dit), (out.text, text)):
        for path, module in list(modules.items()):
            if problem := shape_problem(module, tuple(weights[path].shape)):
                problems.append(f"{path}: {problem}")
                del modules[path]
    if not out.dit and not out.text:
        raise InputError(
            "Nothing of this LoRA fits the model.",
            file=lora.path, found=shorten(problems), expected="modules of Anima with fitting shapes",
            fix="Check that the LoRA was trained on Anima; for another depth or width it cannot fit.",
        )  # fmt: skip
    return out, problems


def report(lora: LoraFile, applied: SortedLora, problems: Sequence[str]) -> str:
    """How many of the file's tensors are applied, by group, and why the others are not."""
    groups = ", ".join(f"{name} {count}" for name, count in applied.groups().items() if count)
    done = sum(applied.groups().values())
    lines = [f"{Path(lora.path).name}: {done} of {applied.total} tensors applied ({groups})"]
    if problems:
        lines += [f"not applied ({len(problems)}):", *("  " + line for line in problems[:20])]
    return "\n".join(lines)


def module_weights(tensors: Mapping[str, Weight], root: str = "") -> dict[str, Weight]:
    """Module path below `root` -> its weight, of a model's named tensors."""
    return {
        name[len(root) : -len(".weight")]: tensor
        for name, tensor in tensors.items()
        if name.startswith(root) and name.endswith(".weight")
    }


@torch.no_grad()
def apply_to_modules(model: nn.Module, modules: Mapping[str, Module], strength: float) -> None:
    """Change a model's parameters in place."""
    for path, module in modules.items():
        target: Any = model.get_submodule(path)
        weight = {suffix: tensor for suffix, tensor in module.items() if suffix not in (".diff_b", ".b_norm")}
        if weight:
            target.weight = nn.Parameter(patched_weight(target.weight, weight, strength), requires_grad=False)
        for suffix in (".diff_b", ".b_norm"):
            if suffix in module:
                bias = target.bias + strength * module[suffix].to(target.bias)
                target.bias = nn.Parameter(bias, requires_grad=False)


def parse_lora_argument(text: str) -> tuple[str, float]:
    """`FILE[:strength]` -> file and strength (1 by default); a drive letter's colon is not a strength."""
    path, colon, number = text.rpartition(":")
    if colon and path:
        try:
            return path, float(number)
        except ValueError:
            pass
    return text, 1.0


def apply_files(
    arguments: Sequence[str], transformer: nn.Module, text_encoder: nn.Module, say: Callable[[str], None]
) -> None:
    """Apply `FILE[:strength]` arguments to standalone models in place, saying what was applied."""
    for argument in arguments:
        path, strength = parse_lora_argument(argument)
        lora = read_lora(path)
        dit, text = (module_weights(dict(model.named_parameters())) for model in (transformer, text_encoder))
        applied, problems = sort_for(lora, dit, text)
        apply_to_modules(transformer, applied.dit, strength)
        apply_to_modules(text_encoder, applied.text, strength)
        say(report(lora, applied, problems))
