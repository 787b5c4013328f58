"""LoRA files on the command line: inspect, convert, merge, extract, generate --lora."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from anima.cli import main
from anima.errors import InputError
from anima.lora.blocks import Strengths, group_of, parse_blocks, parse_remap
from anima.lora.convert import SPELLINGS, sort_by_name
from anima.lora.files import parse_lora_argument, read_lora

MODULES = ("blocks.0.self_attn.q_proj", "blocks.2.mlp.layer2", "llm_adapter.blocks.1.mlp.0")


def lora_tensors() -> dict[str, Tensor]:
    out = {}
    for index, path in enumerate(MODULES):
        rows, columns = tiny.dit()[path + ".weight"].shape
        generator = torch.Generator().manual_seed(index)
        key = "lora_unet_" + path.replace(".", "_")
        out[key + ".lora_up.weight"] = torch.randn(rows, 4, generator=generator) / 4
        out[key + ".lora_down.weight"] = torch.randn(4, columns, generator=generator) / 4
        out[key + ".alpha"] = torch.tensor(2.0)
    generator = torch.Generator().manual_seed(9)
    out["lora_te_layers_1_mlp_up_proj.lora_up.weight"] = torch.randn(96, 4, generator=generator)
    out["lora_te_layers_1_mlp_up_proj.lora_down.weight"] = torch.randn(4, 64, generator=generator)
    return out


def merged(strength: float) -> dict[str, Tensor]:
    """The tiny DiT with the LoRA, by plain arithmetic."""
    out, lora = tiny.dit(), lora_tensors()
    for path in MODULES:
        key = "lora_unet_" + path.replace(".", "_")
        out[path + ".weight"] += strength * 0.5 * lora[key + ".lora_up.weight"] @ lora[key + ".lora_down.weight"]
    return out


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    tiny.write_models(folder)
    save_file(lora_tensors(), folder / "lora.safetensors", {"ss_base_model": "anima"})
    return folder


def test_inspect(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lora", "inspect", str(files / "lora.safetensors"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["groups"] == {"DiT": 6, "LLM adapter": 3, "text encoder": 2} and report["ranks"] == [4]
    assert report["blocks"] == "0-2" and report["unknown"] == [] and report["metadata"] == {"ss_base_model": "anima"}


@pytest.mark.parametrize("first", SPELLINGS)
@pytest.mark.parametrize("second", SPELLINGS)
def test_convert_keeps_what_the_lora_does(files: Path, tmp_path: Path, first: str, second: str) -> None:
    one, two = tmp_path / "one.safetensors", tmp_path / "two.safetensors"
    assert main(["lora", "convert", str(files / "lora.safetensors"), str(one), "--spelling", first]) == 0
    assert main(["lora", "convert", str(one), str(two), "--spelling", second]) == 0
    assert main(["lora", "convert", str(one), str(two), "--spelling", second]) == 1, "it must not overwrite"
    before, after = (sort_by_name(read_lora(path)) for path in (files / "lora.safetensors", two))
    assert set(after.dit) == set(before.dit) and set(after.text) == set(before.text) and not after.unknown
    for path in before.dit:

        def change(module: dict[str, Tensor]) -> Tensor:
            scale = float(module.get(".alpha", torch.tensor(4.0))) / 4
            return scale * module[".lora_up.weight"] @ module[".lora_down.weight"]

        assert torch.allclose(change(after.dit[path]), change(before.dit[path]), rtol=1e-5, atol=1e-7)


def test_merge_is_plain_arithmetic(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dit, out = files / "diffusion_models" / "tiny.safetensors", tmp_path / "merged.safetensors"
    assert main(["lora", "merge", str(dit), f"{files / 'lora.safetensors'}:0.6", "--out", str(out)]) == 0
    assert "9 of 11 tensors applied" in capsys.readouterr().out
    result, expected = load_file(out), merged(0.6)
    assert set(result) == {"net." + name for name in expected}
    for name, tensor in expected.items():
        assert torch.allclose(result["net." + name], tensor, rtol=1e-5, atol=1e-6), name


def test_extract_recovers_the_lora(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, tuned = files / "diffusion_models" / "tiny.safetensors", tmp_path / "tuned.safetensors"
    change = merged(1.0)
    change["blocks.1.self_attn.q_norm.weight"] += 0.25
    save_file(tiny.prefixed(change, "net."), tuned)
    out, again = tmp_path / "extracted.safetensors", tmp_path / "again.safetensors"
    assert main(["lora", "extract", str(base), str(tuned), "--rank", "4", "--out", str(out)]) == 0
    assert float(capsys.readouterr().out.split()[-1]) < 1e-3
    assert main(["lora", "merge", str(base), str(out), "--out", str(again)]) == 0
    for name, tensor in load_file(tuned).items():
        assert torch.allclose(load_file(again)[name], tensor, atol=1e-4), name
    assert main(["lora", "extract", str(base), str(base), "--out", str(tmp_path / "none.safetensors")]) == 1
    assert main(["lora", "extract", str(base), str(tuned), "--rank", "2", "--out", str(out), "--force"]) == 0
    assert 0.1 < float(capsys.readouterr().out.split()[-1]) < 1, "a lower rank loses something, and says so"


def test_generate_with_a_lora(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file(tiny.prefixed(merged(0.8), "net."), files / "diffusion_models" / "merged.safetensors")
    without_text = {n: t for n, t in lora_tensors().items() if not n.startswith("lora_te")}
    save_file(without_text, files / "dit_only.safetensors")

    def picture(dit: str, *extra: str) -> np.ndarray:
        out = tmp_path / "x.png"
        parts = {
            "--dit": f"diffusion_models/{dit}",
            "--text-encoder": "text_encoders/tiny.safetensors",
            "--vae": "vae/tiny.safetensors",
        }
        where = [text for flag, name in parts.items() for text in (flag, str(files / name))]
        assert (
            main(["generate", *where, "--prompt", "red", "--steps", "2", "--size", "64x64", "--out", str(out), *extra])
            == 0
        )
        return np.asarray(Image.open(out)).astype(int)

    plain, ours = (
        picture("tiny.safetensors"),
        picture("tiny.safetensors", "--lora", f"{files / 'dit_only.safetensors'}:0.8"),
    )
    assert "9 of 9 tensors applied" in capsys.readouterr().err
    assert (
        json.loads(Image.open(tmp_path / "x.png").info["prompt"])["l"]["inputs"]["loras"] == "dit_only.safetensors:0.8"
    )
    assert np.abs(ours - picture("merged.safetensors")).max() <= 1 < np.abs(ours - plain).max()
    with_text = picture("tiny.safetensors", "--lora", f"{files / 'lora.safetensors'}:0.8")
    assert np.abs(with_text - ours).max() > 1


def test_arguments() -> None:
    assert parse_lora_argument("a.safetensors:0.5") == ("a.safetensors", 0.5)
    assert parse_lora_argument("C:\\a.safetensors") == ("C:\\a.safetensors", 1.0)
    assert parse_blocks("0-2:0.5, 4:-1\n5 = 2") == {0: 0.5, 1: 0.5, 2: 0.5, 4: -1.0, 5: 2.0}
    assert parse_remap("0-1:2-3, 0:9") == {0: [2, 9], 1: [3]}
    for parse in (parse_blocks, parse_remap):
        with pytest.raises(InputError, match="cannot be read"):
            parse("0-:1")
    assert (
        group_of("final_layer.adaln_modulation.1") == "other"
        and group_of("blocks.3.adaln_modulation_mlp.1") == "modulation"
    )
    assert Strengths({"mlp": 0.5}, {3: 2.0}).of("blocks.3.mlp.layer1") == 1.0
