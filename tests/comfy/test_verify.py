"""`anima verify`: our port passes against both references, and twelve broken ports are named for what they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import torch.nn.functional as F
from einops.layers.torch import Rearrange
from host import fused_host

import anima.adapter
import anima.sampling
import anima.text.tokenizers
import anima.transformer
import anima.vae
from anima.cli import main
from anima.errors import AnimaError
from anima.verify.ours import OurSide
from anima.verify.recording import Job, Recording, record
from anima.verify.report import compare, hint
from anima.verify.with_comfyui import record_comfyui

Patch = Callable[[pytest.MonkeyPatch, OurSide], None]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    models = tmp_path_factory.mktemp("verify")
    tiny.write_models(models)
    files = {part: str(models / folder / "tiny.safetensors") for part, folder in
             (("dit", "diffusion_models"), ("text_encoder", "text_encoders"), ("vae", "vae"))}  # fmt: skip
    return Job(**files)


@pytest.fixture(scope="module")
def references(job: Job) -> dict[str, Recording]:
    pytest.importorskip("diffusers")
    from anima.verify.with_diffusers import DiffusersSide

    return {"comfyui": record_comfyui(job), "diffusers": record(DiffusersSide(job), job, "diffusers")}


def test_our_port_passes(job: Job, references: dict[str, Recording]) -> None:
    ours = record(OurSide(job), job, "anima")
    for name, reference in references.items():
        report = compare(ours, reference)
        assert report.first_difference is None, report.as_text()
        assert len(report.rows) == len(reference.stages) == 25 + tiny.CONFIG.num_blocks
        if name == "comfyui" and fused_host():
            assert {row.stage for row in report.rows if row.verdict != "equal bits"} <= {"image"}
        assert all(row.max_rel < 1e-5 for row in report.rows), report.as_text()


def swapped_attention(self: Any, x: Any, context: Any, rope: Any, options: Any) -> Any:
    """RoPE before the norm."""
    q, k = (self._split(layer(x if self.is_self else source)) for layer, source in
            ((self.q_proj, x), (self.k_proj, context)))  # fmt: skip
    q = self._split(self.q_proj(x))
    if self.is_self:
        q, k = anima.transformer.rotate(q, rope), anima.transformer.rotate(k, rope)
    q, k = self.q_norm(q), self.k_norm(k)
    q, k, v = (t.transpose(1, 2) for t in (q, k, self._split(self.v_proj(context))))
    return self.output_proj(self.attention(q, k, v, self.heads))


def interleaved(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    pairs = x.unflatten(-1, (-1, 2))
    return torch.einsum("...ij,...j->...i", table, pairs).flatten(-2)


def adapter_norm_first(self: Any, states: Any, ids: Any) -> Any:
    x = self.in_proj(self.embed(ids, out_dtype=states.dtype))
    rope, source = (anima.adapter.adapter_rope(n, self.head_dim, x) for n in (x.shape[1], states.shape[1]))
    for block in self.blocks:
        x = block(x, states, rope, source)
    return self.out_proj(F.rms_norm(x, x.shape[-1:])) * self.norm.weight


forward = anima.transformer.AnimaTransformer.forward
features = anima.transformer.timestep_features
tokenize = anima.text.tokenizers.PromptTokenizer.__call__
other_order = Rearrange("b c (t r) (h m) (w n) -> b t h w (r m n c)", r=1, m=2, n=2)

BROKEN: dict[str, tuple[str, Patch]] = {
    "adapter norm before out_proj": ("adapter rows",
        lambda m, s: m.setattr(anima.adapter.LLMAdapter, "forward", adapter_norm_first)),
    "interleaved RoPE": ("block 0 rotated queries and keys",
        lambda m, s: m.setattr(anima.transformer, "rotate", interleaved)),
    "RoPE before QK norm": ("block 0 rotated queries and keys",
        lambda m, s: m.setattr(anima.transformer.Attention, "forward", swapped_attention)),
    "wrong patch order": ("patch embedding",
        lambda m, s: m.setitem(s.module("x_embedder.proj")._modules, "0", other_order)),
    "timestep x1000": ("timestep embedding",
        lambda m, s: m.setattr(anima.transformer, "timestep_features", lambda t, dim: features(t * 1000, dim))),
    "velocity sign": ("velocity at sigma 1.0",
        lambda m, s: m.setattr(anima.transformer.AnimaTransformer, "forward", lambda *a, **k: -forward(*a, **k))),
    "missing adaln_lora": ("block 0 modulated input",
        lambda m, s: m.setattr(anima.transformer.TimestepEmbedding, "forward", lambda self, x: torch.zeros(*x.shape[:-1], 3 * x.shape[-1]))),
    "latent std not applied": ("vae input",
        lambda m, s: m.setattr(anima.vae, "LATENTS_STD", (1.0,) * 16)),
    "missing </s>": ("token ids (t5)",
        lambda m, s: m.setattr(anima.text.tokenizers.PromptTokenizer, "__call__", lambda self, p: dataclasses.replace(
            tokenize(self, p), t5=tokenize(self, p).t5[:-1], t5_weights=tokenize(self, p).t5_weights[:-1]))),
    "context not padded": ("context",
        lambda m, s: m.setattr(anima.transformer, "finish_context", lambda rows, weights=None: rows)),
    "NTK ratio 1": ("rope table",
        lambda m, s: m.setattr(s.pipeline.transformer, "config", dataclasses.replace(
            s.pipeline.transformer.config, rope_ratio_h=1.0, rope_ratio_w=1.0))),
    "shift 1": ("sigmas", lambda m, s: m.setattr(anima.sampling, "flow_shift", lambda t, shift: t)),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_port_is_named(
    job: Job, references: dict[str, Recording], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    stage, patch = BROKEN[what]
    side = OurSide(job)
    patch(monkeypatch, side)
    ours = record(side, job, "broken")
    monkeypatch.undo()
    for reference in references.values():
        report = compare(ours, reference)
        assert report.first_difference == stage, report.as_text()
        assert hint(stage) and hint(stage) in report.as_text()


def test_a_saved_report_is_compared_with(job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["verify", "--dit", job.dit, "--text-encoder", job.text_encoder, "--vae", job.vae]
    saved = str(tmp_path / "saved.safetensors")
    assert main([*arguments, "--save", saved]) == 0
    assert main([*arguments, "--against", saved, "--json"]) == 0
    assert main([*arguments, "--against", saved, "--dtype", "bf16"]) == 0
    assert main([*arguments, "--against", saved, "--shift", "2"]) == 1
    assert "first stage that differs: sigmas" in capsys.readouterr().out
    with pytest.raises(AnimaError, match="not a saved report"):
        Recording.load(job.dit)


def test_a_missing_comfyui_is_named(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMFYUI_PATH", "/nowhere")
    with pytest.raises(AnimaError, match="no ComfyUI"):
        record_comfyui(job)


def test_not_a_number_differs(job: Job, references: dict[str, Recording]) -> None:
    reference = references["comfyui"]
    ours = Recording({**reference.stages, "image": reference.stages["image"] * float("nan")}, reference.info)
    assert compare(ours, reference).first_difference == "image"
