"""Quantised files: unpacked values equal the reference library's bits, and the standalone model runs on them."""

from __future__ import annotations

import contextlib
import json
import random
import struct
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from anima.checkpoint.codecs import GGUF_BLOCKS, GGUF_TYPES, unpack_gguf
from anima.checkpoint.dit import plan_dit
from anima.checkpoint.gguf_header import read_gguf_header
from anima.checkpoint.layouts import vae_to_original
from anima.checkpoint.reading import read_tensors
from anima.cli import main
from anima.errors import AnimaError
from anima.inspection import inspect_file
from anima.packed import PackedTensor
from anima.pipeline import Pipeline, load_transformer, load_vae, local_path
from anima.quantize import FORMATS

gguf = pytest.importorskip("gguf")
READABLE = sorted(t.name for t in gguf.quants._type_traits if t.name in GGUF_BLOCKS and t.name != "BF16")
LARGEST_ERROR = {"fp8": 0.04, "fp8_scaled": 0.04, "int8": 0.04, "nf4": 0.13, "gguf:Q8_0": 0.01, "gguf:Q5_1": 0.06,
                 "gguf:Q5_0": 0.08, "gguf:Q4_1": 0.12, "gguf:Q4_0": 0.13}  # fmt: skip


def suffix(format: str) -> str:
    return ".gguf" if format.startswith("gguf") else ".safetensors"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny models, and the DiT in every format."""
    folder = tmp_path_factory.mktemp("formats")
    tiny.write_models(folder)
    for format in FORMATS:
        out = folder / "diffusion_models" / (format.replace(":", "_") + suffix(format))
        assert (
            main(["quantize", str(folder / "diffusion_models" / "tiny.safetensors"), str(out), "--format", format]) == 0
        )
    return folder


def quantised(models: Path, format: str) -> Path:
    return models / "diffusion_models" / (format.replace(":", "_") + suffix(format))


@pytest.mark.parametrize("kind", READABLE)
def test_gguf_values_are_the_libraries_bits(kind: str) -> None:
    values, size = GGUF_BLOCKS[kind]
    assert (values, size) == tuple(gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]])
    blocks = np.random.default_rng(0).integers(0, 256, (4096, size), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    ours = unpack_gguf(kind, {"blocks": torch.from_numpy(blocks)}).numpy().reshape(expected.shape)
    assert np.array_equal(ours.view(np.uint32)[np.isfinite(expected)], expected.view(np.uint32)[np.isfinite(expected)])
    assert np.isfinite(expected).mean() > 0.5 and np.array_equal(np.isfinite(ours), np.isfinite(expected))


def test_gguf_type_numbers_are_the_libraries() -> None:
    for number, name in GGUF_TYPES.items():
        assert gguf.GGMLQuantizationType(number).name == name


@pytest.mark.parametrize("nested", [False, True])
def test_nf4_values_are_bitsandbytes_bits(tmp_path: Path, nested: bool) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    weight = torch.randn(384, 96)
    name = "blocks.1.mlp.layer1.weight"
    packed, state = bnb.functional.quantize_4bit(weight, blocksize=64, compress_statistics=nested, quant_type="nf4")
    extras = {f"{name}.{key}": value for key, value in state.as_dict(packed=True).items()}
    save_file({**tiny.dit(), name: packed, **extras}, tmp_path / "bnb.safetensors")
    plan = plan_dit(tmp_path / "bnb.safetensors")
    assert plan.quantisation == "bitsandbytes nf4"
    ours = read_tensors(plan.sources[0])[name]
    assert isinstance(ours, PackedTensor) and ours.nbytes < 0.6 * weight.numel()
    expected = bnb.functional.dequantize_4bit(packed, state)
    assert torch.equal(ours.with_dtype(torch.float32).unpacked(), expected)


def test_our_nf4_is_what_bitsandbytes_makes(models: Path) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    name = "blocks.1.mlp.layer1.weight"
    packed, state = bnb.functional.quantize_4bit(tiny.dit()[name], blocksize=64, quant_type="nf4")
    file = load_file(quantised(models, "nf4"))
    assert torch.equal(file[name + ".absmax"], state.absmax)
    assert (file[name].flatten() == packed.flatten()).float().mean() > 0.999


def test_a_packed_tensor_is_a_tensor() -> None:
    blocks = torch.from_numpy(
        gguf.quantize(np.random.default_rng(1).normal(size=(8, 64)).astype(np.float32), gguf.GGMLQuantizationType.Q8_0)
    )
    packed = PackedTensor({"blocks": blocks.reshape(-1, 34)}, (unpack_gguf, "Q8_0"), (8, 64), torch.float32)
    dense = packed.unpacked()
    assert torch.equal(torch.nn.functional.linear(torch.eye(64), packed), dense.T) and packed.shape == (8, 64)
    parameter = torch.nn.Parameter(packed, requires_grad=False)
    assert isinstance(parameter.detach(), PackedTensor) and isinstance(parameter.to("cpu", copy=True), PackedTensor)
    assert isinstance(parameter.clone(), PackedTensor) and packed.nbytes == 8 * 68
    half = parameter.to(torch.bfloat16)
    assert not isinstance(half, PackedTensor) and torch.equal(half, dense.bfloat16())
    assert torch.equal(packed.with_dtype(torch.bfloat16).unpacked(), dense.bfloat16())
    compiled = torch.compile(lambda x, w: torch.nn.functional.linear(x, w), backend="eager")
    assert torch.equal(compiled(torch.eye(64), packed), dense.T)


@pytest.mark.parametrize("format", FORMATS)
def test_the_quantised_model_is_the_unpacked_model(
    models: Path, tmp_path: Path, format: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = quantised(models, format)
    model = load_transformer(path, None, torch.float32)
    matrices = {n: p for n, p in model.named_parameters() if isinstance(p, PackedTensor)}
    assert bool(matrices) == (format != "fp8")
    dense = {n: (p.unpacked() if isinstance(p, PackedTensor) else p).clone() for n, p in model.state_dict().items()}
    save_file(dense, tmp_path / "dense.safetensors")
    plain = load_transformer(tmp_path / "dense.safetensors", None, torch.float32)
    x, context = torch.randn(1, 16, 8, 8), torch.randn(1, 512, 48)
    with torch.inference_mode():
        ours, expected = (m(x, torch.tensor([0.5]), context) for m in (model, plain))
    assert (ours - expected).abs().max() <= 1e-5 * expected.abs().max()
    original = tiny.dit()
    for name, tensor in dense.items():
        error = float((tensor - original[name]).norm() / original[name].norm())
        assert error <= (LARGEST_ERROR[format] if name in matrices or format == "fp8" else 0), name
    report = inspect_file(path)
    assert (
        report["kind"] == "anima_dit" and not report["missing"] and not report["unexpected"] and not report["misshapen"]
    )
    out = tmp_path / f"again{suffix(format)}"
    source = str(models / "diffusion_models" / "tiny.safetensors")
    assert main(["quantize", source, str(out), "--format", format, "--keep", "blocks.0.*", "--check", "fp32"]) == 0
    said = capsys.readouterr().out
    assert (
        "relative error of a whole forward pass: 0.0" in said
        and "blocks.0." not in said
        and f"{16 if '.gguf' in path.name else 20} matrices" in said
    )
    assert main(["quantize", source, str(out), "--format", format]) == 1, "it must not overwrite"
    assert main(["quantize", str(out), str(tmp_path / f"twice{suffix(format)}"), "--format", format]) == 1


@pytest.mark.parametrize("format", ["nf4", "gguf:Q8_0", "fp8", "fp8_scaled"])
def test_generate_runs_on_it(models: Path, tmp_path: Path, format: str) -> None:
    arguments = [
        "--text-encoder",
        str(models / "text_encoders" / "tiny.safetensors"),
        "--vae",
        str(models / "vae" / "tiny.safetensors"),
    ]
    out = tmp_path / "x.png"
    command = [
        "generate",
        "--dit",
        str(quantised(models, format)),
        *arguments,
        "--prompt",
        "red",
        "--steps",
        "2",
        "--size",
        "64x64",
    ]
    assert main([*command, "--out", str(out)]) == 0 and out.exists()


@pytest.mark.parametrize("wrong,said", [
    (["--format", "nf4"], "name does not fit"), (["--format", "gguf:Q8_0", "--keep", "nothing"], "cannot be read"),
])  # fmt: skip
def test_quantize_says_what_is_wrong(
    tmp_path: Path, wrong: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quantize", str(tmp_path / "absent.safetensors"), str(tmp_path / "x.gguf"), *wrong]) == 1
    assert said in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_vae_in_diffusers_keys_is_the_same_vae(tmp_path: Path) -> None:
    single = pytest.importorskip("diffusers.loaders.single_file_utils")
    original = tiny.vae()
    renamed = single.convert_wan_vae_to_diffusers(dict(original))
    assert {vae_to_original(name) for name in renamed} == set(original)
    save_file({n: t.contiguous() for n, t in renamed.items()}, tmp_path / "d.safetensors")
    save_file(original, tmp_path / "o.safetensors")
    latent = torch.randn(1, 16, 4, 4)
    ours, expected = (load_vae(tmp_path / f"{x}.safetensors", torch.float32).decode(latent) for x in "do")
    assert torch.equal(ours, expected)


def test_a_bundle_and_a_hub_repo_are_one_argument(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = {
        **tiny.prefixed(tiny.dit(), "model.diffusion_model."), **tiny.prefixed(tiny.vae(), "first_stage_model."),
        **tiny.prefixed(tiny.text_encoder(), "text_encoders.qwen3_06b.transformer."),
    }  # fmt: skip
    save_file(bundle, tmp_path / "bundle.safetensors")
    command = ["generate", "--prompt", "red", "--steps", "1", "--size", "64x64", "--out", str(tmp_path / "x.png")]
    assert main([*command, "--dit", str(tmp_path / "bundle.safetensors")]) == 0
    repo = tmp_path / "repo"
    source = str(models / "diffusion_models" / "tiny.safetensors")
    assert main(["convert", source, str(repo), "--layout", "diffusers"]) == 0
    for folder, tensors in (("text_encoder", tiny.text_encoder()), ("vae", tiny.vae())):
        (repo / folder).mkdir()
        save_file(tensors, repo / folder / "model.safetensors")
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub, "snapshot_download", lambda name, **_: str(repo) if name == "someone/anima" else 1 / 0)
    assert main([*command, "--dit", "someone/anima"]) == 0
    with pytest.raises(AnimaError, match="hub repo cannot be fetched"):
        local_path("someone/else")
    assert Pipeline.load(repo, repo, repo).transformer.config == tiny.CONFIG


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32), cut=st.booleans())
def test_damaged_gguf_headers_raise_only_our_errors(
    models: Path, tmp_path_factory: pytest.TempPathFactory, seed: int, cut: bool
) -> None:
    rng = random.Random(seed)
    raw = bytearray(quantised(models, "gguf:Q4_0").read_bytes()[: 20_000 if cut else None])
    for _ in range(rng.randint(1, 8)):
        place = rng.randrange(4, 3000)
        if rng.random() < 0.5:
            raw[place] = rng.randrange(256)
        else:
            raw[place : place + 8] = struct.pack("<Q", rng.choice([2**63, 2**40, 0, 10**9]))
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(raw)
    with contextlib.suppress(AnimaError):
        read_gguf_header(path)


def test_damaged_nf4_state_is_refused(models: Path, tmp_path: Path) -> None:
    tensors = load_file(quantised(models, "nf4"))
    key = next(name for name in tensors if name.endswith("bitsandbytes__nf4"))
    for state in ({"shape": [5, 5]}, {"shape": "x"}, [], {"shape": [-1, 4]}):
        raw = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        save_file({**tensors, key: raw}, tmp_path / "bad.safetensors")
        with pytest.raises(AnimaError, match="quantisation state"):
            plan_dit(tmp_path / "bad.safetensors")
