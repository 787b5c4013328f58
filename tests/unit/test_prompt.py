"""Prompt weights."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anima.text.prompt import Segment, parse_weights


@pytest.mark.parametrize(
    "prompt,expected",
    [
        ("", []),
        ("plain", [("plain", 1.0)]),
        ("(strong)", [("strong", 1.1)]),
        ("((very))", [("very", 1.1 * 1.1)]),
        ("a (b:1.5) c", [("a ", 1.0), ("b", 1.5), (" c", 1.0)]),
        ("saber \\(fate\\)", [("saber (fate)", 1.0)]),
        ("(saber \\(fate\\):1.2)", [("saber (fate)", 1.2)]),
        ("(open", [("(open", 1.0)]),
        ("(a:b)", [("a:b", 1.1)]),
        ("(x:-1)", [("x", -1.0)]),
    ],
)
def test_weights(prompt: str, expected: list[tuple[str, float]]) -> None:
    assert parse_weights(prompt) == [Segment(*pair) for pair in expected]


@given(st.text(alphabet="ab ():\\.1,", max_size=60))
def test_never_fails_and_keeps_the_letters(prompt: str) -> None:
    text = "".join(segment.text for segment in parse_weights(prompt))
    assert [c for c in text if c in "ab,"] == [c for c in prompt if c in "ab,"]


def test_deep_nesting_does_not_overflow() -> None:
    segments = parse_weights("(" * 5000 + "x" + ")" * 5000)
    assert segments[0].text == "x"
