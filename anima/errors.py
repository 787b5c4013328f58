"""The one family of exceptions this project raises for a user's mistake or a user's file.

Every message answers four questions: which file, what was found, what was expected, what to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from os import PathLike


class AnimaError(Exception):
    """Base of all errors raised on purpose.

    Args:
        problem: One sentence saying what went wrong.
        file: The file it happened with, if any.
        found: What was there.
        expected: What should have been there.
        fix: What the user can do about it.
    """

    def __init__(
        self,
        problem: str,
        *,
        file: str | PathLike[str] | None = None,
        found: str | None = None,
        expected: str | None = None,
        fix: str | None = None,
    ):
        self.problem, self.file, self.found, self.expected, self.fix = problem, file, found, expected, fix
        parts = (("File", file), ("Found", found), ("Expected", expected), ("What to do", fix))
        super().__init__("\n".join([problem, *(f"  {name}: {text}" for name, text in parts if text)]))


class CheckpointError(AnimaError):
    """A file is damaged: truncated, malformed, or its tensors do not fit the architecture."""


class WrongKindError(AnimaError):
    """A sound file of the wrong kind was given, e.g. an SDXL checkpoint where the Anima DiT belongs."""


class InputError(AnimaError):
    """A value handed to a node or a command cannot work, e.g. a 4-channel latent."""


class MissingPackageError(AnimaError):
    """An optional Python package is needed for what was asked."""

    def __init__(self, package: str, purpose: str):
        super().__init__(
            f"{purpose} needs the Python package '{package}', which is not installed.",
            fix=f"pip install {package}   (in ComfyUI's own Python environment), then restart.",
        )


def check_tensors(
    part: str, problems: Mapping[str, Sequence[str]], *, file: str | PathLike[str], expected: str, fix: str
) -> None:
    """Raise CheckpointError for the first kind of problem that has tensors under it.

    Args:
        part: What the file is, e.g. `The VAE file`.
        problems: Kind of problem, e.g. `lacks tensors` -> the tensors concerned.
    """
    for what, names in problems.items():
        if names:
            raise CheckpointError(
                f"{part} {what}; using it would give wrong pictures.",
                file=file,
                found=f"{len(names)}: {shorten(names)}",
                expected=expected,
                fix=fix,
            )


def shorten(names: Iterable[str], most: int = 5) -> str:
    """Join names for a message, at most `most` of them, saying how many more there are."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
