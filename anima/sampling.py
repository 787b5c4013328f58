"""The flow schedule: sigma runs from 1 (noise) to 0 (image), bent by a shift."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

SHIFT = 3.0
SCHEDULE_STEPS = 1000

Number = TypeVar("Number", float, Tensor)


def flow_shift(t: Number, shift: float = SHIFT) -> Number:
    """Bend linear time t in [0, 1] towards the noisy end: shift * t / (1 + (shift - 1) * t)."""
    return shift * t / (1 + (shift - 1) * t)
