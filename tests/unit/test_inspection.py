"""`anima inspect` on every kind of file: right, fast, small."""

from __future__ import annotations

import json
import struct
import time
import tracemalloc
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import save_file
from torch import Tensor

from anima.checkpoint.layouts import DIT_PREFIXES
from anima.convert import convert_dit
from anima.errors import AnimaError
from anima.inspection import inspect_file

SECONDS, BYTES = 0.05, 60_000_000


def z(*names: str, shape: tuple[int, ...] = (2, 2)) -> dict[str, Tensor]:
    return {name: torch.zeros(shape) for name in names}


def fp8(scaled: bool) -> dict[str, Tensor]:
    tensors = {n: t.to(torch.float8_e4m3fn) if t.ndim == 2 else t for n, t in tiny.dit().items()}
    extras = {n.removesuffix("weight") + "scale_weight": torch.ones(()) for n, t in tensors.items() if t.ndim == 2}
    return tensors | (extras | {"scaled_fp8": torch.zeros(2)} if scaled else {})


def nf4() -> dict[str, Tensor]:
    name = "net.blocks.0.mlp.layer1.weight"
    tensors = tiny.prefixed(tiny.dit(), "net.")
    packed = torch.zeros(tensors[name].numel() // 2, 1, dtype=torch.uint8)
    state = json.dumps({"quant_type": "nf4", "shape": list(tensors[name].shape)})
    extras = {f"{name}.absmax": torch.zeros(9), f"{name}.quant_map": torch.zeros(16),
              f"{name}.quant_state.bitsandbytes__nf4": torch.tensor(list(state.encode()), dtype=torch.uint8)}  # fmt: skip
    return {**tensors, name: packed, **extras}


def bundle() -> dict[str, Tensor]:
    return {
        **tiny.prefixed(tiny.dit(), "model.diffusion_model."), **tiny.prefixed(tiny.vae(), "first_stage_model."),
        **tiny.prefixed(tiny.text_encoder(), "text_encoders.qwen3_06b.transformer."),
    }  # fmt: skip


FILES: dict[str, tuple[str, dict[str, Tensor]]] = {
    **{f"dit {prefix or 'bare'}": ("anima_dit", tiny.prefixed(tiny.dit(), prefix)) for prefix in DIT_PREFIXES},
    "bundle": ("bundle", bundle()),
    "plain cosmos": ("cosmos_predict2", {n: t for n, t in tiny.dit().items() if "llm_adapter" not in n}),
    "adapter": ("anima_adapter", {n: t for n, t in tiny.dit().items() if "llm_adapter" in n}),
    "raw fp8": ("anima_dit", fp8(False)),
    "scaled fp8": ("anima_dit", fp8(True)),
    "nf4": ("anima_dit", nf4()),
    "bf16": ("anima_dit", tiny.dit(dtype=torch.bfloat16)),
    "qwen3": ("qwen3", tiny.text_encoder()),
    "qwen3 with head": ("qwen3", {**tiny.text_encoder(), **z("lm_head.weight")}),
    "vae": ("wan_vae", tiny.vae()),
    "lora": ("lora_anima", z("lora_unet_blocks_0_mlp_layer1.lora_up.weight", "lora_unet_blocks_0_mlp_layer1.lora_down.weight")),
    "lokr": ("lora_anima", z("lycoris_blocks_0_mlp_layer1.lokr_w1", "lycoris_blocks_0_mlp_layer1.lokr_w2")),
    "sdxl lora": ("lora_sdxl", z("lora_unet_input_blocks_4_1_proj_in.lora_up.weight")),
    "flux lora": ("lora_flux", z("lora_unet_double_blocks_0_img_attn_proj.lora_up.weight")),
    "wan lora": ("lora_wan", z("diffusion_model.blocks.0.ffn.0.lora_A.weight")),
    "lllite": ("lllite", z("lllite_dit_blocks_0_self_attn_q_proj.down.0.weight")),
    "sdxl": ("sdxl", z("model.diffusion_model.input_blocks.0.0.weight")),
    "flux": ("flux", z("double_blocks.0.img_attn.proj.weight")),
    "wan": ("wan", z("blocks.0.ffn.0.weight", "patch_embedding.weight")),
    "sd vae": ("sd_vae", z("decoder.conv_in.weight", "decoder.conv_out.weight")),
    "t5": ("t5", z("encoder.block.0.layer.0.SelfAttention.q.weight")),
    "clip": ("clip", z("text_model.encoder.layers.0.mlp.fc1.weight")),
    "embedding": ("embedding", z("qwen3_06b")),
    "something else": ("unknown", z("a", "b")),
    "no tensors": ("empty", {}),
}  # fmt: skip
QUANTISED = {"raw fp8": "raw fp8", "scaled fp8": "scaled fp8", "nf4": "bitsandbytes nf4", "bf16": "none"}


def inspected(path: Path) -> dict[str, object]:
    """The report, made within the limits of time and memory."""
    inspect_file(path)  # the first call in a process imports
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        report = inspect_file(path)
        seconds.append(time.perf_counter() - start)
    tracemalloc.start()
    inspect_file(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert min(seconds) < SECONDS and peak < BYTES, (seconds, peak)
    return report


@pytest.mark.parametrize("name", FILES)
def test_every_kind_is_told(tmp_path: Path, name: str) -> None:
    kind, tensors = FILES[name]
    save_file(tensors, tmp_path / "f.safetensors", {"made": "here"})
    report = inspected(tmp_path / "f.safetensors")
    assert report["kind"] == kind and report["tensors"] == len(tensors) and report["metadata"] == {"made": "here"}
    assert not report.get("missing") and not report.get("unexpected") and not report.get("misshapen")
    if kind == "anima_dit":
        assert "3 blocks, width 96" in str(report["config"]) and report["quantisation"] == QUANTISED.get(name, "none")
    if name.startswith("dit "):
        assert (report["layout"], report["prefix"]) == ("original", "" if name == "dit bare" else name[4:])


def test_diffusers_folder_and_sharded_index(tmp_path: Path) -> None:
    save_file(tiny.prefixed(tiny.dit(), "net."), tmp_path / "f.safetensors")
    convert_dit(tmp_path / "f.safetensors", tmp_path / "folder", "diffusers")
    assert inspected(tmp_path / "folder" / "transformer")["kind"] == "anima_dit_diffusers"
    halves = list(tiny.dit().items())
    weight_map = {}
    for index, part in enumerate((halves[:50], halves[50:])):
        save_file(dict(part), tmp_path / f"part{index}.safetensors")
        weight_map |= {name: f"part{index}.safetensors" for name, _ in part}
    (tmp_path / "m.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    report = inspected(tmp_path / "m.safetensors.index.json")
    assert report["kind"] == "anima_dit" and report["tensors"] == len(halves) and not report["missing"]


@pytest.mark.parametrize("start,said", [
    (b"", "file is empty"), (b"abc", "too short"), (b"PK\x03\x04" + b"0" * 99, "zip archive"), (b"\x80\x02" + b"0" * 99, "pickle"),
    (b"<!DOCTYPE html>", "web page"), (struct.pack("<Q", 100_000_000) + b"{" * 99, "header length"),
    (struct.pack("<Q", 2**63) + b"{" * 99, "header length"), (struct.pack("<Q", 50) + b"{" * 50, "header"),
    (b"version https://git-lfs", "Git LFS"),
])  # fmt: skip
def test_what_is_no_model_is_refused_at_once(tmp_path: Path, start: bytes, said: str) -> None:
    path = tmp_path / "f.safetensors"
    with path.open("wb") as file:
        file.write(start)
        if said == "header length":
            file.truncate(100_000_100)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        with pytest.raises(AnimaError, match=said):
            inspect_file(path)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < SECONDS
