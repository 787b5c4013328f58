"""An independent judge of the demo model's pictures: background, colour and shape by classical image analysis.

Nothing here is learned from the model: colours are compared with the palette, shapes with drawn templates.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass

import numpy as np
from host import REPO
from scipy import ndimage

sys.path.insert(0, str(REPO / "tools" / "demo_model"))
from pictures import COLORS, SHAPES, SIZE, Scene, Thing, draw, is_held_out

TEMPLATE = 32


@dataclass(frozen=True)
class Seen:
    """What a picture shows."""

    background: str
    color: str
    shape: str


def held_out() -> list[tuple[str, str, str]]:
    """All (shape, colour, background) that training never saw together."""
    return [(s, c, b) for s in SHAPES for c in COLORS for b in COLORS if b != c and is_held_out(s, c, b)]


def prompts(count: int = 64) -> list[tuple[str, Seen]]:
    """Held-out prompts in a fixed order: tags first, then the same combinations as sentences."""
    combos = held_out()
    random.Random(1).shuffle(combos)
    tags = [(f"{c} {s}, {b} background", Seen(b, c, s)) for s, c, b in combos]
    sentences = [(f"a {c} {s} on a {b} background", Seen(b, c, s)) for s, c, b in combos]
    return (tags + sentences)[:count]


def nearest_color(rgb: np.ndarray) -> str:
    return min(COLORS, key=lambda name: float(np.square(rgb - np.array(COLORS[name])).sum()))


def object_mask(picture: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Background colour (median of the border) and the mask of the largest thing that differs from it."""
    picture = picture.astype(np.float32)
    border = np.concatenate(
        [
            picture[:6].reshape(-1, 3),
            picture[-6:].reshape(-1, 3),
            picture[:, :6].reshape(-1, 3),
            picture[:, -6:].reshape(-1, 3),
        ]
    )
    background = np.median(border, axis=0)
    different = np.abs(picture - background).max(axis=-1) > 45
    labels, count = ndimage.label(different)
    if count == 0:
        return background, np.zeros(different.shape, bool)
    sizes = ndimage.sum(different, labels, range(1, count + 1))
    return background, labels == 1 + int(np.argmax(sizes))


def normalised(mask: np.ndarray) -> np.ndarray:
    """A mask's bounding box scaled to a square of fixed size."""
    rows, columns = np.where(mask)
    box = mask[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1].astype(np.float32)
    zoom = (TEMPLATE / box.shape[0], TEMPLATE / box.shape[1])
    return ndimage.zoom(box, zoom, order=1, grid_mode=True, mode="nearest") > 0.5


def templates() -> dict[str, list[np.ndarray]]:
    rng = random.Random(2)
    out: dict[str, list[np.ndarray]] = {}
    for shape in SHAPES:
        for size in ("small", "medium", "large"):
            picture = draw(Scene("white", (Thing(shape, "black", size, "center"),)), rng, SIZE)
            out.setdefault(shape, []).append(normalised(object_mask(picture)[1]))
    return out


_TEMPLATES = templates()


def look(picture: np.ndarray) -> Seen | None:
    """Judge a uint8 picture (H, W, 3); None when there is no thing on it."""
    background, mask = object_mask(picture)
    if mask.sum() < 120:
        return None
    shape_mask = normalised(mask)

    def overlap(template: np.ndarray) -> float:
        return float((shape_mask & template).sum() / (shape_mask | template).sum())

    shape = max(_TEMPLATES, key=lambda name: max(overlap(t) for t in _TEMPLATES[name]))
    inner = ndimage.binary_erosion(mask, iterations=2)
    color = np.median(picture[inner if inner.any() else mask].astype(np.float32), axis=0)
    return Seen(nearest_color(background), nearest_color(color), shape)


def score(pictures: list[np.ndarray], wanted: list[Seen]) -> int:
    """How many pictures show the right background, colour and shape."""
    return sum(look(picture) == seen for picture, seen in zip(pictures, wanted, strict=True))
