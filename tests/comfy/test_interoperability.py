"""Files saved by core nodes load in both, previews and attention overrides act on ours as on native."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from graphs import capture, loaders, prompt, sampler
from host import Graph, Host, fused_host
from safetensors.torch import load_file
from torch import Tensor


@pytest.fixture(scope="module")
def both(host: Host) -> Host:
    import native

    native.NativeLoader.config = tiny.CONFIG
    host.nodes.NODE_CLASS_MAPPINGS["NativeLoader"] = native.NativeLoader
    return host


def model(loader: str, file: str) -> Graph:
    return {
        "m": {"class_type": loader, "inputs": {"unet_name": file, "weight_dtype": "default"}},
        "om": capture("m", 0, "model"),
    }


def latent(host: Host, loader: str, file: str) -> Tensor:
    graph = loaders() | model(loader, file) | {"p": prompt("red circle")} | sampler("p", model=["m", 0])
    return host.run(graph)["latent"]["samples"]


def same(ours: Tensor, expected: Tensor) -> bool:
    if fused_host():
        return torch.equal(ours, expected)
    return bool((ours - expected).abs().max() <= 1e-3 * expected.abs().max())


def output(host: Host, prefix: str) -> Path:
    (path,) = (host.root / "output").glob(f"{prefix}*.safetensors")
    return path


@pytest.mark.parametrize("saver", ["NativeLoader", "AnimaUNetLoader"])
def test_model_save_reloads_in_both(both: Host, saver: str) -> None:
    expected = latent(both, saver, "tiny.safetensors")
    save: Graph = {"s": {"class_type": "ModelSave", "inputs": {"model": ["m", 0], "filename_prefix": f"by_{saver}"}}}
    both.run(model(saver, "tiny.safetensors") | save)
    path = output(both, f"by_{saver}")
    path.rename(both.root / "models" / "diffusion_models" / path.name)
    for loader in ("NativeLoader", "AnimaUNetLoader"):
        assert same(latent(both, loader, path.name), expected), loader


def test_checkpoint_save_reloads_in_both(both: Host) -> None:
    expected = latent(both, "AnimaUNetLoader", "tiny.safetensors")
    save: Graph = {"s": {"class_type": "CheckpointSave", "inputs": {
        "model": ["a", 0], "clip": ["a", 1], "vae": ["a", 2], "filename_prefix": "checkpoint"}}}  # fmt: skip
    both.run(loaders() | save)
    path = output(both, "checkpoint")
    (both.root / "models" / "checkpoints").mkdir(exist_ok=True)
    path = path.rename(both.root / "models" / "checkpoints" / path.name)
    inside = "from the model file"
    bundled = loaders(unet_name=path.name, clip_name=inside, vae_name=inside)
    decode: Graph = {
        "d": {"class_type": "VAEDecode", "inputs": {"samples": ["ks", 0], "vae": ["a", 2]}}, "od": capture("d", 0, "image"),
    }  # fmt: skip
    rest = {"p": prompt("red circle")} | sampler("p") | decode
    out, before = both.run(bundled | rest), both.run(loaders() | rest)
    assert torch.equal(out["latent"]["samples"], expected) and torch.equal(out["image"], before["image"])
    names = {
        n.removeprefix("model.diffusion_model.") for n in load_file(path) if n.startswith("model.diffusion_model.")
    }
    assert names == set(tiny.dit()), "the names under which native reads it"


def test_previews_are_natives(both: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    import latent_preview

    models = [both.run(model(name, "tiny.safetensors"))["model"] for name in ("NativeLoader", "AnimaUNetLoader")]
    monkeypatch.setattr(latent_preview.args, "preview_method", latent_preview.LatentPreviewMethod.Latent2RGB)
    x = torch.randn(1, 16, 1, 6, 8)
    pictures = []
    for loaded in models:
        previewer = latent_preview.get_previewer(loaded.load_device, loaded.model.latent_format)
        pictures.append(previewer.decode_latent_to_preview(x))
        seen: dict[str, Any] = {}
        latent_preview.prepare_callback(loaded, 2, seen)(0, x, x, 2)
        assert seen["x0"] is x
    theirs, ours = (picture.tobytes() for picture in pictures)
    assert ours == theirs and len(set(ours)) > 10


@pytest.mark.parametrize("loader", ["NativeLoader", "AnimaUNetLoader"])
def test_attention_override_sees_every_attention(both: Host, loader: str) -> None:
    """The override a MODEL carries in its options is called for both attentions of each block at each forward."""
    loaded = both.run(model(loader, "tiny.safetensors"))["model"].clone()
    calls: list[tuple[int, ...]] = []

    def override(original: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        calls.append(tuple(k.shape))
        return original(q, k, v, *args, **kwargs)

    loaded.model_options["transformer_options"] = {"optimized_attention_override": override}
    network = loaded.model.diffusion_model
    with torch.inference_mode():
        network(
            torch.randn(1, 16, 1, 8, 8), torch.tensor([0.5]), torch.randn(1, 512, 48),
            transformer_options=loaded.model_options["transformer_options"],
        )  # fmt: skip
    assert calls == [(1, 2, 16, 48), (1, 2, 512, 48)] * tiny.CONFIG.num_blocks
