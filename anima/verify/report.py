"""Comparing two recordings stage by stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .recording import Recording

BOUNDS = {"fp32": 1e-3, "bf16": 0.15, "fp16": 1e-2}
"""Largest difference taken for rounding, relative to the largest value of the stage."""

HINTS = {
    "token ids (qwen3)": "the Qwen tokenizer: files, special tokens, prompt weights split before tokenising",
    "token ids (t5)": "the T5 tokenizer: the ids must end with </s> once",
    "qwen3 states": "the text encoder: its file, RoPE theta, final norm, causal mask",
    "adapter rows": "the LLM adapter: norm(out_proj(x)) in this order, RoPE theta 10000, norm before each part",
    "context": "prompt weights and zero padding of the adapter's rows to 512",
    "sigmas": "the schedule: shift 3.0, sigma from 1 down to 0",
    "patch embedding": "the patch order (c r m n) and the padding-mask channel",
    "timestep embedding": "timestep = sigma in (0, 1], features cos before sin, the norm after the embedder",
    "rope table": "RoPE frequencies: axes h = w = dim // 6 * 2, NTK ratios h 4, w 4, t 1",
    "block 0 modulated input": "adaLN: modulation + adaln_lora, LayerNorm without affine, (1 + scale), shift",
    "block 0 rotated queries and keys": "QK RMSNorm before RoPE, rotation in split halves",
    "block": "attention, cross-attention, MLP and their gates in this block",
    "velocity": "the final layer: modulation by two terms, unpatchify (p1 p2 t C), the sign of the velocity",
    "latent at step": "the noise and the sampler's step",
    "prediction at step": "guidance and x - sigma * velocity; NaN here gives a black image",
    "vae input": "latent * std + mean of Wan 2.1",
    "image": "the VAE and the range of the picture",
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One stage of the comparison. `verdict` is equal bits, within the bound, differs, or missing."""

    stage: str
    shape: list[int]
    verdict: str
    cosine: float
    max_abs: float
    max_rel: float
    std: float
    reference_std: float


@dataclass(frozen=True)
class Report:
    """All stages up to the first that differs."""

    rows: list[Row]
    bound: float
    ours: dict[str, Any]
    reference: dict[str, Any]

    @property
    def first_difference(self) -> str | None:
        last = self.rows[-1]
        return last.stage if last.verdict not in ("equal bits", "within the bound") else None

    def as_json(self) -> dict[str, Any]:
        return {
            "first_difference": self.first_difference, "bound": self.bound, "ours": self.ours,
            "reference": self.reference, "stages": [vars(row) for row in self.rows],
        }  # fmt: skip

    def as_text(self) -> str:
        lines = [f"{'stage':34} {'verdict':17} {'cosine':>9} {'max abs':>9} {'max rel':>9} {'std':>8} {'ref std':>8}"]
        for r in self.rows:
            lines.append(
                f"{r.stage:34} {r.verdict:17} {r.cosine:9.6f} {r.max_abs:9.2e} {r.max_rel:9.2e} "
                f"{r.std:8.4f} {r.reference_std:8.4f}"
            )
        first = self.first_difference
        if first is None:
            lines.append(f"all {len(self.rows)} stages agree (bound {self.bound:g} of the largest value)")
        else:
            lines.append(f"first stage that differs: {first}\nlook at: {hint(first)}")
        return "\n".join(lines)


def hint(stage: str) -> str:
    """What to look at when a stage is the first that differs."""
    return HINTS.get(stage) or next((text for name, text in HINTS.items() if stage.startswith(name)), "")


def compare(ours: Recording, reference: Recording) -> Report:
    """Compare in order, and stop at the first stage that differs: later ones only follow from it."""
    dtypes = [str(recording.info["job"]["dtype"]) for recording in (ours, reference)]
    bound = max(BOUNDS[dtype] for dtype in dtypes)
    rows = []
    for stage, theirs in reference.stages.items():
        rows.append(_row(stage, ours.stages.get(stage), theirs, bound))
        if rows[-1].verdict not in ("equal bits", "within the bound"):
            break
    return Report(rows, bound, ours.info, reference.info)


def _row(stage: str, ours: Tensor | None, theirs: Tensor, bound: float) -> Row:
    shape, nan = list(theirs.shape), float("nan")
    b = theirs.double()
    if ours is None or ours.shape != theirs.shape:
        verdict = "missing" if ours is None else "differs in shape"
        return Row(stage, shape, verdict, nan, nan, nan, _std(ours), _std(theirs))
    a = ours.double()
    difference = (a - b).abs().max().item()
    relative = difference / max(b.abs().max().item(), 1e-12)
    exact = not theirs.is_floating_point()
    if torch.equal(ours, theirs):
        verdict = "equal bits"
    elif exact or not relative <= bound:  # a NaN is not within any bound
        verdict = "differs"
    else:
        verdict = "within the bound"
    cosine = F.cosine_similarity(a.flatten(), b.flatten(), dim=0).item()
    return Row(stage, shape, verdict, cosine, difference, relative, _std(ours), _std(theirs))


def _std(value: Tensor | None) -> float:
    return float("nan") if value is None else value.double().std(correction=0).item()
