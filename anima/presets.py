"""Settings by variant of the model, as its makers recommend them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .sampling import SHIFT


@dataclass(frozen=True)
class Preset:
    """What a sampler needs to know."""

    steps: int
    cfg: float
    sampler: str
    scheduler: str = "simple"
    shift: float = SHIFT
    negative: str = "worst quality, low quality, score_1, score_2, score_3, blurry, jpeg artifacts, sepia"


PRESETS = {
    "base": Preset(steps=30, cfg=4.0, sampler="er_sde"),
    "aesthetic": Preset(steps=40, cfg=4.5, sampler="er_sde"),
    "turbo": Preset(steps=10, cfg=1.0, sampler="er_sde"),
}
"""The makers name ranges: 30 to 50 steps at cfg 4 to 5; with turbo 8 to 12 steps at cfg 1, where the negative has no part."""


def variant_of(names: Iterable[str]) -> str:
    """Which preset fits, from the names of the model file and of its LoRAs; base when they tell nothing."""
    known = [variant for name in names for variant in ("turbo", "aesthetic") if variant in name.lower()]
    return "turbo" if "turbo" in known else known[0] if known else "base"
