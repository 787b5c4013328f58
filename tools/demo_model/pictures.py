"""The demo model's world: coloured shapes on plain backgrounds, drawn with PIL, with captions."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

SIZE = 128
SHAPES = ("circle", "square", "triangle", "star", "ring", "heart")
COLORS = {
    "red": (220, 30, 30), "green": (30, 160, 50), "blue": (40, 70, 220), "yellow": (245, 220, 50),
    "orange": (245, 140, 30), "purple": (140, 50, 180), "black": (20, 20, 20), "white": (245, 245, 245),
}  # fmt: skip
SIZES = {"small": 20, "medium": 30, "large": 42}
"""Radius in pixels."""
POSITIONS = {
    "top left": (-1, -1), "top": (0, -1), "top right": (1, -1), "left": (-1, 0), "center": (0, 0),
    "right": (1, 0), "bottom left": (-1, 1), "bottom": (0, 1), "bottom right": (1, 1),
}  # fmt: skip
HELD_OUT_EVERY = 6
TWO_THINGS, CENTERED = 0.03, 0.88
"""Shares of pictures with two things, and of single things that are in the middle."""
SIZE_WEIGHTS = (1, 2, 8)


@dataclass(frozen=True)
class Thing:
    """One object of a picture."""

    shape: str
    color: str
    size: str
    position: str


@dataclass(frozen=True)
class Scene:
    """A background and one or two things."""

    background: str
    things: tuple[Thing, ...]


def is_held_out(shape: str, color: str, background: str) -> bool:
    """Whether this combination is kept out of training for the scored test."""
    index = SHAPES.index(shape) * 7 + list(COLORS).index(color) * 3 + list(COLORS).index(background) * 5
    return index % HELD_OUT_EVERY == 0


def random_scene(rng: random.Random) -> Scene:
    """A scene for training: never a held-out combination, colours never equal to the background."""
    background = rng.choice(list(COLORS))
    places, sizes = list(POSITIONS), list(SIZES)
    single = "center" if rng.random() < CENTERED else rng.choice(places)
    positions = ("left", "right") if rng.random() < TWO_THINGS else (single,)
    things: list[Thing] = []
    while len(things) < len(positions):
        shape, color = rng.choice(SHAPES), rng.choice(list(COLORS))
        if color == background or is_held_out(shape, color, background):
            continue
        size = rng.choice(sizes[:2]) if len(positions) > 1 else rng.choices(sizes, SIZE_WEIGHTS)[0]
        things.append(Thing(shape, color, size, positions[len(things)]))
    return Scene(background, tuple(things))


def caption(scene: Scene, rng: random.Random) -> str:
    """A caption as tags or as a sentence; size and position are sometimes left unsaid."""
    say_size, say_position = rng.random() < 0.5, rng.random() < 0.5
    if len(scene.things) > 1:
        a, b = scene.things
        if rng.random() < 0.5:
            return f"{a.color} {a.shape} and {b.color} {b.shape}, {scene.background} background"
        return f"a {a.color} {a.shape} next to a {b.color} {b.shape} on a {scene.background} background"
    (thing,) = scene.things
    if rng.random() < 0.6:
        tags = [f"{thing.color} {thing.shape}", f"{scene.background} background"]
        tags += [thing.size] * say_size + [thing.position] * say_position
        if rng.random() < 0.15:
            tags = rng.sample(tags, rng.randint(1, len(tags)))
        elif rng.random() < 0.1:
            tags = [rng.choice([thing.color, thing.shape, f"{scene.background} background"])]
        return ", ".join(tags)
    size = f"{thing.size} " if say_size else ""
    place = f" at the {thing.position}" if say_position else ""
    return f"a {size}{thing.color} {thing.shape}{place} on a {scene.background} background"


def draw(scene: Scene, rng: random.Random, size: int = SIZE) -> np.ndarray:
    """Draw a scene, antialiased, with a little jitter in place, size and colour: uint8 (size, size, 3)."""
    scale = 3
    canvas = Image.new("RGB", (size * scale, size * scale), _jitter(COLORS[scene.background], rng))
    pen = ImageDraw.Draw(canvas)
    for thing in scene.things:
        dx, dy = POSITIONS[thing.position]
        radius = SIZES[thing.size] * rng.uniform(0.96, 1.04) * size / SIZE * scale
        x = size * scale * (0.5 + 0.2 * dx) + rng.uniform(-2, 2) * scale
        y = size * scale * (0.5 + 0.2 * dy) + rng.uniform(-2, 2) * scale
        _draw_shape(pen, thing.shape, x, y, radius, _jitter(COLORS[thing.color], rng), canvas)
    return np.asarray(canvas.resize((size, size), Image.Resampling.BOX))


def outline(shape: str, x: float, y: float, radius: float) -> list[tuple[float, float]]:
    """Polygon of a shape around (x, y); a ring gives its outer circle."""
    if shape == "square":
        side = radius * 0.85
        return [(x - side, y - side), (x + side, y - side), (x + side, y + side), (x - side, y + side)]
    if shape == "heart":
        steps = [i / 48 * 2 * math.pi for i in range(48)]
        return [
            (
                x + radius * math.sin(t) ** 3,
                y - radius / 16 * (13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)),
            )
            for t in steps
        ]
    corners = {"triangle": 3, "star": 10, "circle": 64, "ring": 64}[shape]
    points = []
    for i in range(corners):
        r = radius * (0.45 if shape == "star" and i % 2 else 1.1 if shape in ("star", "triangle") else 1.0)
        angle = 2 * math.pi * i / corners - math.pi / 2
        points.append((x + r * math.cos(angle), y + r * math.sin(angle)))
    return points


def _draw_shape(pen, shape, x, y, radius, color, canvas) -> None:
    if shape != "ring":
        pen.polygon(outline(shape, x, y, radius), fill=color)
        return
    mask = Image.new("L", canvas.size, 0)
    mask_pen = ImageDraw.Draw(mask)
    mask_pen.ellipse([x - radius, y - radius, x + radius, y + radius], fill=255)
    mask_pen.ellipse([x - radius * 0.55, y - radius * 0.55, x + radius * 0.55, y + radius * 0.55], fill=0)
    canvas.paste(Image.new("RGB", canvas.size, color), mask=mask)


def _jitter(color: tuple[int, int, int], rng: random.Random) -> tuple[int, int, int]:
    r, g, b = (max(0, min(255, channel + rng.randint(-8, 8))) for channel in color)
    return r, g, b
