"""Every quantised format in a real ComfyUI: it samples as its unpacked weights do, with a LoRA on top as well.

GGUF and nf4 stay packed and a LoRA is added to the unpacked weight, so both agree with plain arithmetic. ComfyUI's own
scaled formats are requantised by the host after a LoRA; the bound for that is one rounding of the format.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch
from graphs import capture, loaders, prompt, sampler
from host import Graph, Host
from safetensors.torch import load_file, save_file
from torch import Tensor

pytest.importorskip("gguf")
FORMATS = ["fp8", "fp8_scaled", "int8", "nf4", "gguf:Q8_0", "gguf:Q5_1", "gguf:Q4_0"]
PACKED = [f for f in FORMATS if f == "nf4" or f.startswith("gguf")]
BOUND = {"int8": 0.1}
"""ComfyUI's int8 rounds the activations as well; the others agree within 1e-5."""
LORA_BOUND = {"fp8": 0.3, "fp8_scaled": 0.3, "int8": 0.1}
"""Largest difference of a latent, relative, after the host has requantised the weights the LoRA changed."""
Q = "blocks.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def files(host: Host) -> dict[str, str]:
    """Format -> file name in models/diffusion_models; a file of the unpacked weights lies beside it."""
    out = {}
    folder = host.root / "models" / "diffusion_models"
    for format in FORMATS:
        name = format.replace(":", "_") + (".gguf" if format.startswith("gguf") else ".safetensors")
        host.module("anima.quantize").quantize_dit(folder / "tiny.safetensors", folder / name, format)
        model = host.module("anima.pipeline").load_transformer(folder / name, None, torch.float32)
        packed = host.module("anima.packed").PackedTensor
        dense = {n: (p.unpacked() if isinstance(p, packed) else p).clone() for n, p in model.state_dict().items()}
        save_file(dense, folder / f"dense_{name}.safetensors")
        out[format] = name
    return out


def load(name: str, dtype: str = "default") -> Graph:
    return {"m": {"class_type": "AnimaUNetLoader", "inputs": {"unet_name": name, "weight_dtype": dtype}},
            "om": capture("m", 0, "model"), "or": capture("m", 1, "dit_report")}  # fmt: skip


def latent(host: Host, graph: Graph, model: str = "m") -> Tensor:
    out = host.run(loaders() | graph | {"p": prompt("red circle, white background")} | sampler("p", model=[model, 0]))
    return out["latent"]["samples"]


def difference(ours: Tensor, expected: Tensor) -> float:
    return float((ours - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("format", FORMATS)
def test_it_samples_as_its_unpacked_weights(host: Host, files: dict[str, str], format: str) -> None:
    if format in ("fp8_scaled", "int8") and not host_reads(format):
        pytest.skip(f"this ComfyUI does not know {format}")
    ours = latent(host, load(files[format]))
    expected = latent(host, load(f"dense_{files[format]}.safetensors"))
    plain = latent(host, load("tiny.safetensors"))
    error = difference(ours, expected)
    print(f"{format}: against its unpacked weights {error:.2e}, against the unquantised {difference(ours, plain):.2e}")
    assert error <= BOUND.get(format, 1e-5) and difference(expected, plain) > 1e-5


def host_reads(format: str) -> bool:
    import comfy.quant_ops

    return {"fp8_scaled": "float8_e4m3fn", "int8": "int8_tensorwise"}[format] in comfy.quant_ops.QUANT_ALGOS


@pytest.mark.parametrize("format", FORMATS)
def test_a_lora_on_top(host: Host, files: dict[str, str], format: str) -> None:
    if format in ("fp8_scaled", "int8") and not host_reads(format):
        pytest.skip(f"this ComfyUI does not know {format}")
    up, down = torch.randn(96, 4, generator=torch.Generator().manual_seed(1)), torch.randn(4, 96) * 0.3
    key = "lora_unet_blocks_0_self_attn_q_proj"
    save_file(
        {f"{key}.lora_up.weight": up, f"{key}.lora_down.weight": down},
        host.root / "models" / "loras" / f"on_{files[format]}.safetensors",
    )
    inputs = {
        "model": ["m", 0],
        "lora_name": f"on_{files[format]}.safetensors",
        "strength_model": 1.0,
        "strength_clip": 1.0,
    }
    ours = latent(host, load(files[format]) | {"lo": {"class_type": "AnimaLoraLoader", "inputs": inputs}}, "lo")
    folder = host.root / "models" / "diffusion_models"
    dense = load_file(folder / f"dense_{files[format]}.safetensors")
    without = latent(host, load(f"dense_{files[format]}.safetensors"))
    dense[f"{Q}.weight"] += up @ down
    save_file(dense, folder / f"merged_{files[format]}.safetensors")
    expected = latent(host, load(f"merged_{files[format]}.safetensors"))
    error = difference(ours, expected)
    print(f"{format}: LoRA on top, largest relative difference {error:.2e}")
    assert error <= LORA_BOUND.get(format, 1e-5) and difference(expected, without) > 1e-3
    again = latent(host, load(files[format]))
    assert difference(again, without) <= BOUND.get(format, 1e-5), "the LoRA must be gone without a trace"


@pytest.mark.parametrize("format", PACKED)
def test_it_stays_packed_and_can_be_saved(host: Host, files: dict[str, str], format: str) -> None:
    out = host.run(loaders() | load(files[format]))
    weight = out["model"].model.diffusion_model.blocks[1].mlp.layer1.weight
    assert type(weight).__name__ == "PackedTensor" and weight.nbytes < 1.1 * weight.numel()
    assert ("GGUF" if "gguf" in format else "nf4") in out["dit_report"]
    saved: Graph = {
        "s": {"class_type": "ModelSave", "inputs": {"model": ["m", 0], "filename_prefix": f"saved_{files[format]}"}}
    }
    host.run(load(files[format]) | saved)
    (path,) = Path(host.root / "output").glob(f"saved_{files[format]}*")
    target = host.root / "models" / "diffusion_models" / f"saved_{files[format]}.safetensors"
    path.rename(target)
    expected = latent(host, load(f"dense_{files[format]}.safetensors"))
    assert difference(latent(host, load(target.name)), expected) <= 2e-2, "saved unpacked, in bfloat16"


def test_fp8_norms_and_embeddings_are_raised(host: Host) -> None:
    folder = host.root / "models" / "diffusion_models"
    everything = {n: t.to(torch.float8_e4m3fn) for n, t in tiny.dit().items()}
    save_file(everything, folder / "all_fp8.safetensors")
    save_file({n: t.float() for n, t in everything.items()}, folder / "all_fp8_dense.safetensors")
    out = host.run(loaders() | load("all_fp8.safetensors", "fp8_e4m3fn"))
    model = out["model"].model.diffusion_model
    fp8 = {n for n, p in model.named_parameters() if p.dtype == torch.float8_e4m3fn}
    assert fp8 == {n for n, t in tiny.dit().items() if t.ndim == 2 and not n.endswith("embed.weight")}
    ours = latent(host, load("all_fp8.safetensors", "fp8_e4m3fn"))
    assert difference(ours, latent(host, load("all_fp8_dense.safetensors"))) <= 1e-5


def test_layouts_of_the_same_weights_give_the_same_image(host: Host) -> None:
    """Eight prefixes, diffusers, sharded, bundle: equal bits."""
    folder = host.root / "models" / "diffusion_models"
    expected = latent(host, load("tiny.safetensors"))
    names = []
    for index, prefix in enumerate(host.module("anima.checkpoint.layouts").DIT_PREFIXES):
        save_file(tiny.prefixed(tiny.dit(), prefix), folder / f"prefix_{index}.safetensors")
        names.append(f"prefix_{index}.safetensors")
    items = list(tiny.dit().items())
    weight_map = {}
    for index, part in enumerate((items[:40], items[40:])):
        save_file(dict(part), folder / f"shard_{index}.safetensors")
        weight_map |= {name: f"shard_{index}.safetensors" for name, _ in part}
    import json

    (folder / "sharded.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for name in [*names, "sharded.safetensors.index.json"]:
        assert torch.equal(latent(host, load(name)), expected), name


def test_a_bundle_loads_from_one_file(host: Host) -> None:
    bundle = {
        **tiny.prefixed(tiny.dit(), "model.diffusion_model."), **tiny.prefixed(tiny.vae(), "first_stage_model."),
        **tiny.prefixed(tiny.text_encoder(), "text_encoders.qwen3_06b.transformer."),
    }  # fmt: skip
    (host.root / "models" / "checkpoints").mkdir(exist_ok=True)
    save_file(bundle, host.root / "models" / "checkpoints" / "bundle.safetensors")
    inside = "from the model file"
    graph = loaders(unet_name="bundle.safetensors", clip_name=inside, vae_name=inside)
    decode: Graph = {
        "d": {"class_type": "WanVAEDecode", "inputs": {"samples": ["ks", 0], "vae": ["a", 2]}}, "od": capture("d", 0, "image"),
    }  # fmt: skip
    rest = {"p": prompt("red circle")} | sampler("p") | decode
    assert torch.equal(host.run(graph | rest)["image"], host.run(loaders() | rest)["image"])
