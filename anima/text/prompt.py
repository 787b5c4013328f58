"""The prompt language: weights in parentheses, read exactly as ComfyUI reads them.

`(text)` multiplies the weight by 1.1, `(text:1.3)` sets it, `\\(` and `\\)` are literal parentheses.
Danbooru names such as `saber \\(fate\\)` need the escapes.
"""

from __future__ import annotations

from typing import NamedTuple

EMPHASIS = 1.1
_ESCAPES = {"\\(": "\0\2", "\\)": "\0\1"}


class Segment(NamedTuple):
    """A run of text under one weight."""

    text: str
    weight: float


def parse_weights(prompt: str) -> list[Segment]:
    """Split a prompt into weighted segments; escapes are resolved, the order is kept.

    Unbalanced parentheses never fail: an unclosed `(` stays in the text, as in ComfyUI.
    """
    for escape, placeholder in reversed(_ESCAPES.items()):
        prompt = prompt.replace(escape, placeholder)
    return [Segment(_unescape(text), weight) for text, weight in _weigh(prompt, 1.0)]


def _unescape(text: str) -> str:
    for escape, placeholder in _ESCAPES.items():
        text = text.replace(placeholder, escape[1])
    return text


def _weigh(text: str, weight: float) -> list[Segment]:
    segments: list[Segment] = []
    stack = [(part, weight) for part in reversed(_split_groups(text))]
    while stack:
        part, outer = stack.pop()
        if len(part) < 2 or part[0] != "(" or part[-1] != ")":
            segments.append(Segment(part, outer))
            continue
        inner, inner_weight = _read_group(part[1:-1], outer)
        stack.extend((piece, inner_weight) for piece in reversed(_split_groups(inner)))
    return segments


def _read_group(inner: str, outer: float) -> tuple[str, float]:
    """The text and weight of a group's inside: `text:1.3` names the weight, anything else is emphasis."""
    colon = inner.rfind(":")
    if colon > 0:
        try:
            return inner[:colon], float(inner[colon + 1 :])
        except ValueError:
            pass
    return inner, outer * EMPHASIS


def _split_groups(text: str) -> list[str]:
    """Cut a text into plain runs and complete top-level groups, parentheses included.

    A surplus `)` makes the depth negative until a `(` brings it back: the odd but established reading.
    """
    parts: list[str] = []
    start = depth = 0
    for position, char in enumerate(text):
        if char == "(":
            if depth == 0 and position > start:
                parts.append(text[start:position])
                start = position
            depth += 1
        elif char == ")":
            depth -= 1
            if depth == 0:
                parts.append(text[start : position + 1])
                start = position + 1
    if start < len(text):
        parts.append(text[start:])
    return parts
