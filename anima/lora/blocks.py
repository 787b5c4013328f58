"""Strengths by group and by block, and moving a LoRA to a model of another depth."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from ..errors import InputError

Value = TypeVar("Value")
GROUPS = ("self_attn", "cross_attn", "mlp", "modulation", "adapter", "other")

_BLOCK = re.compile(r"^blocks\.(\d+)\.")


def group_of(path: str) -> str:
    """The group of a DiT module path: one of GROUPS."""
    if path.startswith("llm_adapter."):
        return "adapter"
    if not path.startswith("blocks."):
        return "other"
    if "adaln_modulation" in path:
        return "modulation"
    return next((group for group in GROUPS[:3] if f".{group}." in path), "other")


def parse_blocks(text: str) -> dict[int, float]:
    """`0-9:0.5, 12:1.2` -> strength of each block named.

    Raises:
        InputError: it cannot be read.
    """
    out: dict[int, float] = {}
    for part in filter(None, (part.strip() for part in re.split(r"[,\n]", text))):
        match = re.fullmatch(r"(\d{1,3})(?:\s*-\s*(\d{1,3}))?\s*[:=]\s*(-?\d+(?:\.\d+)?)", part)
        if not match:
            raise InputError("The strengths of the blocks cannot be read.", found=part, expected="e.g. 0-9:0.5, 12:1.2")
        first, last = int(match[1]), int(match[2] or match[1])
        out |= {block: float(match[3]) for block in range(first, last + 1)}
    return out


def parse_remap(text: str) -> dict[int, list[int]]:
    """`0-13:0-13, 14-27:26-39` -> the LoRA's block -> the model's blocks that get it.

    Raises:
        InputError: it cannot be read, or two ranges differ in length.
    """
    out: dict[int, list[int]] = {}
    for part in filter(None, (part.strip() for part in re.split(r"[,\n]", text))):
        match = re.fullmatch(r"(\d{1,3})(?:\s*-\s*(\d{1,3}))?\s*:\s*(\d{1,3})(?:\s*-\s*(\d{1,3}))?", part)
        ranges = match and (
            range(int(match[1]), int(match[2] or match[1]) + 1), range(int(match[3]), int(match[4] or match[3]) + 1)
        )  # fmt: skip
        if not ranges or len(ranges[0]) != len(ranges[1]):
            raise InputError(
                "The remapping of blocks cannot be read.",
                found=part, expected="pairs of ranges of the same length, e.g. 0-13:0-13, 14-27:26-39",
            )  # fmt: skip
        for source, target in zip(*ranges, strict=True):
            out.setdefault(source, []).append(target)
    return out


def remap_blocks(modules: Mapping[str, Value], remap: Mapping[int, list[int]]) -> dict[str, Value]:
    """Module paths `blocks.N...` moved (or copied) to the blocks named; without a remap they stay."""
    if not remap:
        return dict(modules)
    out: dict[str, Value] = {}
    for path, module in modules.items():
        match = _BLOCK.match(path)
        for target in remap.get(int(match[1]), []) if match else [None]:
            out[path if target is None else _BLOCK.sub(f"blocks.{target}.", path)] = module
    return out


@dataclass(frozen=True)
class Strengths:
    """Multipliers by group and by block; what is not named counts 1."""

    groups: Mapping[str, float] = field(default_factory=dict)
    blocks: Mapping[int, float] = field(default_factory=dict)

    def of(self, path: str) -> float:
        """The multiplier of a DiT module path."""
        match = _BLOCK.match(path)
        return self.groups.get(group_of(path), 1.0) * (self.blocks.get(int(match[1]), 1.0) if match else 1.0)
