"""The two token streams of Anima: Qwen3 ids for the text encoder, T5 ids for the adapter's queries.

The tokenizers themselves come from `transformers`; this module finds their files and assembles ids the
way the model was trained: T5 ends with `</s>` once, Qwen3 gets no special tokens, an empty prompt is one
Qwen3 pad token. Weights apply to the T5 stream only.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import AnimaError, MissingPackageError
from .prompt import parse_weights

QWEN_PAD = 151643
T5_END = 1

QWEN_HUB_ID = "Qwen/Qwen3-0.6B-Base"
T5_HUB_ID = "google/t5-v1_1-xxl"


@dataclass(frozen=True)
class PromptTokens:
    """Ids of one prompt. `t5_weights` has one weight for each T5 id."""

    qwen: list[int]
    t5: list[int]
    t5_weights: list[float]


class PromptTokenizer:
    """Both tokenizers, loaded once.

    Args:
        qwen_dir: Folder or hub id with Qwen's `vocab.json` and `merges.txt` (or `tokenizer.json`).
        t5_dir: Folder or hub id with T5's `tokenizer.json`.
    """

    def __init__(self, qwen_dir: str | os.PathLike[str], t5_dir: str | os.PathLike[str]):
        try:
            from transformers import Qwen2Tokenizer, T5TokenizerFast
        except ImportError as error:
            raise MissingPackageError("transformers", "Turning prompts into tokens") from error
        self._qwen: Any = Qwen2Tokenizer.from_pretrained(qwen_dir)
        self._t5: Any = T5TokenizerFast.from_pretrained(t5_dir)

    def __call__(self, prompt: str) -> PromptTokens:
        """Tokenize one prompt with ComfyUI's weight syntax; nothing is truncated."""
        qwen: list[int] = []
        t5: list[int] = []
        weights: list[float] = []
        for text, weight in parse_weights(prompt):
            qwen += self._qwen(text)["input_ids"]
            ids = self._t5(text)["input_ids"][:-1]
            t5 += ids
            weights += [weight] * len(ids)
        return PromptTokens(qwen or [QWEN_PAD], [*t5, T5_END], [*weights, 1.0])


def find_tokenizers(near: Iterable[str | os.PathLike[str]] = ()) -> PromptTokenizer:
    """Find tokenizer files, see `tokenizer_folders`, and load them.

    Raises:
        AnimaError: there are none and the hub cannot be reached.
    """
    near = list(near)
    try:
        return PromptTokenizer(*tokenizer_folders(near))
    except OSError as error:
        raise AnimaError(
            "The tokenizer files were not found and cannot be fetched.",
            found=f"nothing in {', '.join(str(p) for p in _candidates(near)) or 'the places searched'}; {error}",
            expected="folders qwen25_tokenizer and t5_tokenizer",
            fix="Set COMFYUI_PATH to a ComfyUI folder, or ANIMA_TOKENIZERS to a folder that has both.",
        ) from error


def tokenizer_folders(near: Iterable[str | os.PathLike[str]] = ()) -> tuple[str, str]:
    """Folders of Qwen's and T5's tokenizer files, or their hub ids where there are none.

    Looked at in this order: the folder named by ANIMA_TOKENIZERS (with `qwen25_tokenizer` and `t5_tokenizer`),
    the folders `near` (a diffusers folder has `tokenizer` and `t5_tokenizer`), a ComfyUI named by COMFYUI_PATH
    or enclosing this package, and last the hub's cache or the hub itself.
    """
    for folder in _candidates(near):
        qwen = next((d for d in (folder / "qwen25_tokenizer", folder / "tokenizer") if d.is_dir()), None)
        t5 = next((d for d in (folder / "t5_tokenizer", folder / "tokenizer_2") if d.is_dir()), None)
        if qwen and t5:
            return str(qwen), str(t5)
    return QWEN_HUB_ID, T5_HUB_ID


def _candidates(near: Iterable[str | os.PathLike[str]]) -> list[Path]:
    folders = [os.environ.get("ANIMA_TOKENIZERS"), *near]
    comfy = os.environ.get("COMFYUI_PATH")
    roots = [Path(comfy)] if comfy else []
    roots += [p for p in Path(__file__).resolve().parents if (p / "comfy" / "text_encoders").is_dir()]
    return [Path(f) for f in folders if f] + [root / "comfy" / "text_encoders" for root in roots]
