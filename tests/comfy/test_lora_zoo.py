"""A zoo of LoRA files, each through a real graph: the picture is that of the weights changed by plain arithmetic.

Spellings: the same change under every name trainers use. Kinds: every algorithm, its change computed here from its
definition. Where ComfyUI's own loader maps the name, its bits on native Anima are ours.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from graphs import capture, loaders, prompt, sampler
from host import Graph, GraphError, Host, fused_host
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

DIT = tiny.dit()
Q, ADAPTER = "blocks.0.self_attn.q_proj", "llm_adapter.blocks.1.cross_attn.k_proj"
TEXT = "layers.1.mlp.up_proj"


def noise(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def under(*parts: str) -> str:
    return "_".join(parts).replace(".", "_")


DIFFUSERS = {Q: "transformer_blocks.0.attn1.to_q", ADAPTER: ADAPTER.replace("llm_adapter", "text_conditioner")}
SPELLINGS = {
    "kohya": lambda p: "lora_unet_" + under(p), "comfyui": lambda p: "diffusion_model." + p,
    "model.diffusion_model": lambda p: "model.diffusion_model." + p, "net": lambda p: "net." + p, "bare": lambda p: p,
    "transformer": lambda p: "transformer." + p, "base_model": lambda p: "base_model.model." + p,
    "base_model net": lambda p: "base_model.model.net." + p, "model net": lambda p: "model.net." + p,
    "unet": lambda p: "unet." + p, "lycoris": lambda p: "lycoris_" + under(p),
    "onetrainer": lambda p: "lora_transformer_" + under(p), "dit": lambda p: "lora_dit_" + under(p),
    "diffusers": lambda p: ("transformer." if p == Q else "") + DIFFUSERS[p],
    "diffusers bare": lambda p: DIFFUSERS[p], "diffusers peft": lambda p: "base_model.model." + DIFFUSERS[p],
    "diffusers onetrainer": lambda p: "lora_transformer_" + under(DIFFUSERS[p]),
    "diffusers kohya": lambda p: "lora_unet_" + under(DIFFUSERS[p]),
    "mangled": lambda p: "diffusion_model." + p.replace("self_attn", "self.attn").replace("cross_attn", "cross.attn"),
}  # fmt: skip
TEXT_SPELLINGS = [
    "lora_te_layers_1_mlp_up_proj", "lora_te1_layers_1_mlp_up_proj", "lora_te_model_layers_1_mlp_up_proj",
    "lora_te1_model_layers_1_mlp_up_proj", "lora_text_encoder_layers_1_mlp_up_proj", "lycoris_te_layers_1_mlp_up_proj",
    "text_encoder." + TEXT, "text_encoder.model." + TEXT, "text_encoder.base_model.model." + TEXT,
    "text_encoders.qwen3_06b.transformer.model." + TEXT,
]  # fmt: skip
PAIRS = {"down/up": (".lora_down.weight", ".lora_up.weight"), "A/B": (".lora_A.weight", ".lora_B.weight"),
         "default": (".lora_A.default.weight", ".lora_B.default.weight")}  # fmt: skip
NATIVE = ("kohya", "comfyui")
COUNTER = itertools.count()


def rows_and_columns(path: str) -> tuple[int, int]:
    rows, columns = DIT[path + ".weight"].shape
    return rows, columns


def pair(path: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    rows, columns = rows_and_columns(path)
    return noise(rows, 4, seed=seed, scale=0.3), noise(4, columns, seed=seed + 1, scale=0.3)


def kinds() -> dict[str, tuple[str, dict[str, Tensor], Tensor, dict[str, str]]]:
    """Kind -> module, its tensors by suffix, the changed weight (from the definition), metadata of the file."""
    w = DIT[Q + ".weight"]
    rows, columns = w.shape
    up, down = pair(Q)
    out: dict[str, Any] = {}
    out["lora without alpha"] = (Q, {".lora_up.weight": up, ".lora_down.weight": down}, w + up @ down)
    out["rs-lora"] = (
        Q,
        {".lora_B.weight": up, ".lora_A.weight": down, ".alpha": torch.tensor(3.0)},
        w + up @ down * 3 / 2,
        {"lora_adapter_metadata": json.dumps({"use_rslora": True})},
    )
    moved = w + up @ down * 0.5
    column_size = noise(1, columns, scale=0.1).abs() + 1
    out["dora"] = (
        Q,
        {".lora_up.weight": up, ".lora_down.weight": down, ".alpha": torch.tensor(2.0), ".dora_scale": column_size},
        moved / moved.norm(dim=0, keepdim=True) * column_size,
    )
    a, b, c, d = (
        noise(rows, 4, seed=5, scale=0.3),
        noise(4, columns, seed=6, scale=0.3),
        noise(rows, 4, seed=7),
        noise(4, columns, seed=8),
    )
    out["loha"] = (
        Q,
        {".hada_w1_a": a, ".hada_w1_b": b, ".hada_w2_a": c, ".hada_w2_b": d, ".alpha": torch.tensor(2.0)},
        w + (a @ b) * (c @ d) * 0.5,
    )
    small, large = noise(4, 8, seed=9), noise(rows // 4, columns // 8, seed=10, scale=0.3)
    kron = torch.einsum("ij,kl->ikjl", small, large).reshape(rows, columns)
    out["lokr"] = (Q, {".lokr_w1": small, ".lokr_w2": large}, w + kron)
    e, f = noise(rows // 4, 2, seed=11, scale=0.4), noise(2, columns // 8, seed=12, scale=0.4)
    kron = torch.einsum("ij,kl->ikjl", small, e @ f).reshape(rows, columns)
    out["lokr factored"] = (
        Q,
        {".lokr_w1": small, ".lokr_w2_a": e, ".lokr_w2_b": f, ".alpha": torch.tensor(1.0)},
        w + kron / 2,
    )
    blocks = noise(rows // 8, 8, 8, seed=13, scale=0.2)
    skew = blocks - blocks.mT
    turn = (torch.eye(8) + skew) @ torch.linalg.inv(torch.eye(8) - skew)
    turned = torch.stack([t.T @ piece for t, piece in zip(turn, w.reshape(rows // 8, 8, columns), strict=True)])
    out["oft"] = (Q, {".oft_blocks": blocks}, turned.reshape(rows, columns))
    blocks = noise(1, rows // 8, 8, 8, seed=14, scale=0.2)
    skew = blocks[0] - blocks[0].mT
    turn = (torch.eye(8) + skew) @ torch.linalg.inv(torch.eye(8) - skew)
    order = torch.arange(rows).reshape(-1, 2, 4).transpose(1, 2).reshape(-1)
    shuffled = torch.stack([t @ piece for t, piece in zip(turn, w[order].reshape(rows // 8, 8, columns), strict=True)])
    back = torch.empty_like(w)
    back[order] = shuffled.reshape(rows, columns)
    out["boft"] = (Q, {".oft_blocks": blocks, ".alpha": torch.tensor(0.0)}, back)
    a1, a2 = noise(columns, 4, seed=15, scale=0.2), noise(4, columns, seed=16, scale=0.2)
    out["glora"] = (
        Q,
        {".a1.weight": a1, ".a2.weight": a2, ".b1.weight": up, ".b2.weight": down},
        w + w @ a1 @ a2 + up @ down,
    )
    out["full difference"] = (Q, {".diff": kron}, w + kron)
    scale = noise(rows, seed=17, scale=0.3)
    out["ia3 rows"] = (Q, {".weight": scale, ".on_input": torch.tensor(False)}, w * (1 + scale[:, None]))
    out["ia3 columns"] = (Q, {".weight": scale, ".on_input": torch.tensor(True)}, w * (1 + scale[None]))
    norm = "blocks.1.self_attn.q_norm"
    change = noise(48, seed=18, scale=0.5)
    out["norm"] = (norm, {".diff": change}, DIT[norm + ".weight"] + change)
    out["norm w_norm"] = (norm, {".w_norm": change}, DIT[norm + ".weight"] + change)
    return {k: (*v, {}) if len(v) == 3 else v for k, v in out.items()}  # fmt: skip


KINDS = kinds()
UNKNOWN_TO_CORE = {"ia3 rows", "ia3 columns", "rs-lora"}


@pytest.fixture(scope="module")
def zoo(host: Host) -> Host:
    import native

    native.NativeLoader.config = tiny.CONFIG
    host.nodes.NODE_CLASS_MAPPINGS["NativeLoader"] = native.NativeLoader
    return host


def write(
    host: Host, folder: str, name: str, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None
) -> str:
    name = name.replace(".", f"_{next(COUNTER)}.")  # core's loaders do not notice a replaced file
    path = host.root / "models" / folder / name
    save_file({k: v.contiguous() for k, v in tensors.items()}, path, metadata or {})
    return name


def latent(host: Host, graph: Graph, model: list[Any], clip: list[Any] | None = None) -> Tensor:
    positive = prompt("red circle, white background")
    negative = prompt("")
    if clip:
        positive["inputs"]["clip"] = negative["inputs"]["clip"] = clip
    out = loaders() | graph | {"p": positive} | sampler("p", model=model) | {"neg": negative}
    return host.run(out)["latent"]["samples"]


def through_lora(host: Host, name: str, strength: float = 1.0, with_clip: bool = False, loader: str = "AnimaLoraLoader",
                 base: str = "a") -> Tensor:  # fmt: skip
    inputs = {
        "model": [base, 0],
        "clip": ["a", 1],
        "lora_name": name,
        "strength_model": strength,
        "strength_clip": strength,
    }
    extra = {
        "b": {"class_type": "NativeLoader", "inputs": {"unet_name": "tiny.safetensors", "weight_dtype": "default"}}
    }
    return latent(
        host, {"lo": {"class_type": loader, "inputs": inputs}} | extra, ["lo", 0], ["lo", 1] if with_clip else None
    )


def through_merged(host: Host, changed: dict[str, Tensor], name: str = "merged") -> Tensor:
    file = write(host, "diffusion_models", f"{name}.safetensors", tiny.prefixed({**DIT, **changed}, "net."))
    node = {"class_type": "AnimaUNetLoader", "inputs": {"unet_name": file, "weight_dtype": "default"}}
    return latent(host, {"m": node}, ["m", 0])


def assert_close(ours: Tensor, expected: Tensor, plain: Tensor) -> None:
    assert (ours - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert (plain - expected).abs().max() > 3e-4 * expected.abs().max(), "the LoRA does nothing"


@pytest.fixture(scope="module")
def plain(zoo: Host) -> Tensor:
    return latent(zoo, {}, ["a", 0])


@pytest.fixture(scope="module")
def spelled(zoo: Host) -> Tensor:
    """The change of all spellings, merged."""
    changed = {}
    for path in (Q, ADAPTER):
        up, down = pair(path)
        changed[path + ".weight"] = DIT[path + ".weight"] + up @ down * (2 / 4)
    return through_merged(zoo, changed, "spelled")


def spelled_file(host: Host, spelling: str, pair_name: str) -> str:
    tensors = {}
    for path in (Q, ADAPTER):
        key, (down_suffix, up_suffix) = SPELLINGS[spelling](path), PAIRS[pair_name]
        tensors[key + up_suffix], tensors[key + down_suffix] = pair(path)
        tensors[key + ".alpha"] = torch.tensor(2.0)
    return write(host, "loras", "spelled.safetensors", tensors)


@pytest.mark.parametrize("pair_name", PAIRS)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling(zoo: Host, plain: Tensor, spelled: Tensor, spelling: str, pair_name: str) -> None:
    name = spelled_file(zoo, spelling, pair_name)
    ours = through_lora(zoo, name)
    assert_close(ours, spelled, plain)
    if spelling in NATIVE and pair_name != "default":
        assert torch.equal(through_lora(zoo, name, loader="LoraLoader"), ours)
        theirs = through_lora(zoo, name, loader="LoraLoader", base="b")
        assert torch.equal(theirs, ours) or not fused_host()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spelling", NATIVE)
def test_every_kind(zoo: Host, plain: Tensor, kind: str, spelling: str) -> None:
    path, tensors, changed, metadata = KINDS[kind]
    key = SPELLINGS[spelling](path)
    name = write(zoo, "loras", "kind.safetensors", {key + suffix: t for suffix, t in tensors.items()}, metadata)
    ours = through_lora(zoo, name)
    assert_close(ours, through_merged(zoo, {path + ".weight": changed}), plain)
    if kind not in UNKNOWN_TO_CORE:
        theirs = through_lora(zoo, name, loader="LoraLoader", base="b")
        assert torch.equal(theirs, ours) or not fused_host()


def test_bias_difference(zoo: Host, plain: Tensor) -> None:
    path = "llm_adapter.out_proj"
    change = noise(48, scale=0.5)
    name = write(zoo, "loras", "bias.safetensors", {f"diffusion_model.{path}.diff_b": change})
    expected = through_merged(zoo, {path + ".bias": DIT[path + ".bias"] + change})
    assert_close(through_lora(zoo, name), expected, plain)


def test_fused_qkv(zoo: Host, plain: Tensor) -> None:
    up, down = noise(3 * 96, 4, scale=0.3), noise(4, 96, scale=0.3)
    tensors = {
        "diffusion_model.blocks.0.self_attn.qkv.lora_B.weight": up,
        "diffusion_model.blocks.0.self_attn.qkv.lora_A.weight": down,
    }
    name = write(zoo, "loras", "fused.safetensors", tensors)
    changed = {}
    for index, projection in enumerate("qkv"):
        key = f"blocks.0.self_attn.{projection}_proj.weight"
        changed[key] = DIT[key] + up[96 * index : 96 * (index + 1)] @ down
    assert_close(through_lora(zoo, name), through_merged(zoo, changed), plain)


@pytest.mark.parametrize("key", TEXT_SPELLINGS)
def test_every_spelling_of_the_text_encoder(zoo: Host, plain: Tensor, key: str) -> None:
    up, down = noise(96, 4, scale=0.3), noise(4, 64, scale=0.3)
    name = write(zoo, "loras", "text.safetensors", {key + ".lora_up.weight": up, key + ".lora_down.weight": down})
    file = zoo.root / "models" / "text_encoders" / "merged.safetensors"
    if not file.exists():
        tensors = tiny.text_encoder()
        tensors[f"model.{TEXT}.weight"] += up @ down
        save_file(tensors, file)
    merged = {"c": {"class_type": "AnimaTextEncoderLoader", "inputs": {"clip_name": "merged.safetensors"}}}
    assert_close(through_lora(zoo, name, with_clip=True), latent(zoo, merged, ["a", 0], ["c", 0]), plain)


def test_strengths_order_and_removal(zoo: Host, plain: Tensor) -> None:
    first = spelled_file(zoo, "kohya", "down/up")
    mlp = "blocks.2.mlp.layer1"
    up, down = pair(mlp)
    second = write(zoo, "loras", "second.safetensors", {f"{mlp}.lora_up.weight": up, f"{mlp}.lora_down.weight": down})
    assert torch.equal(through_lora(zoo, first, 0.0), plain)
    for strength in (-0.7, 1.9):
        changed = {}
        for path in (Q, ADAPTER):
            a, b = pair(path)
            changed[path + ".weight"] = DIT[path + ".weight"] + strength * a @ b * (2 / 4)
        assert_close(through_lora(zoo, first, strength), through_merged(zoo, changed), plain)

    def stacked(lines: str) -> Tensor:
        node = {"class_type": "AnimaLoraStack", "inputs": {"model": ["a", 0], "clip": ["a", 1], "loras": lines}}
        return latent(zoo, {"lo": node}, ["lo", 0])

    one, other = (stacked(text) for text in (
        f"{first}:0.8\n# a comment\n{Path(second).stem}:0.5", f"{Path(second).stem}:0.5\n\n{first}:0.8"))  # fmt: skip
    assert (one - other).abs().max() <= 1e-5 * one.abs().max()
    assert torch.equal(stacked(""), plain) and torch.equal(latent(zoo, {}, ["a", 0]), plain)
    with pytest.raises(GraphError, match="not in models/loras"):
        stacked("absent:1")


def test_adapter_lora_with_a_conditioning_finished_without_it_warns(
    zoo: Host, caplog: pytest.LogCaptureFixture
) -> None:
    name = spelled_file(zoo, "kohya", "down/up")
    inputs = {"model": ["a", 0], "lora_name": name, "strength_model": 1.0, "strength_clip": 1.0}
    lora: Graph = {"lo": {"class_type": "AnimaLoraLoader", "inputs": inputs}}

    def warned(model: str) -> bool:
        caplog.clear()
        positive = prompt("red circle")
        positive["inputs"]["model"] = [model, 0]
        zoo.run(loaders() | lora | {"p": positive} | sampler("p", model=["lo", 0]), fresh=True)
        return "has other LoRAs than this one" in caplog.text

    assert warned("a") and not warned("lo")


def advanced(host: Host, name: str, **changes: Any) -> Tensor:
    inputs = {"model": ["a", 0], "lora_name": name, "strength": 1.0, "self_attn": 1.0, "cross_attn": 1.0, "mlp": 1.0,
              "modulation": 1.0, "adapter": 1.0, "text_encoder": 1.0, "blocks": "", "remap": ""}  # fmt: skip
    return latent(host, {"lo": {"class_type": "AnimaLoraAdvanced", "inputs": inputs | changes}}, ["lo", 0])


def test_strengths_by_part_and_remap(zoo: Host, plain: Tensor) -> None:
    name = spelled_file(zoo, "comfyui", "A/B")
    up, down = pair(Q)
    only_q = through_merged(zoo, {Q + ".weight": DIT[Q + ".weight"] + 0.5 * up @ down * 0.6})
    assert_close(advanced(zoo, name, adapter=0.0, self_attn=0.6), only_q, plain)
    assert_close(advanced(zoo, name, adapter=0.0, blocks="0:0.6, 1-2:9"), only_q, plain)
    other = "blocks.2.self_attn.q_proj.weight"
    moved = through_merged(zoo, {other: DIT[other] + 0.5 * up @ down})
    assert_close(advanced(zoo, name, adapter=0.0, remap="0:2"), moved, plain)
    for wrong in ({"blocks": "x"}, {"remap": "0-3:1-2"}):
        with pytest.raises(GraphError, match="cannot be read"):
            advanced(zoo, name, **wrong)


def test_model_merge(zoo: Host, plain: Tensor) -> None:
    other = tiny.dit(seed=9)
    file = write(zoo, "diffusion_models", "other.safetensors", tiny.prefixed(other, "net."))
    ratio = {"self_attn": 1.0, "cross_attn": 1.0, "mlp": 1.0, "modulation": 1.0, "adapter": 0.5, "other": 0.0}
    graph: Graph = {
        "b": {"class_type": "AnimaUNetLoader", "inputs": {"unet_name": file, "weight_dtype": "default"}},
        "mm": {"class_type": "AnimaModelMerge", "inputs": {
            "model1": ["a", 0], "model2": ["b", 0], "ratio": 0.6, "blocks": "0:0, 1:0.5", **ratio}},
    }  # fmt: skip

    def share(name: str) -> float:
        if name.startswith("llm_adapter."):
            return 0.3
        if not name.startswith("blocks."):
            return 0.0
        return 0.6 * {"0": 0.0, "1": 0.5}.get(name.split(".")[1], 1.0)

    mixed = {n: t * (1 - share(n)) + other[n] * share(n) for n, t in DIT.items()}
    assert_close(latent(zoo, graph, ["mm", 0]), through_merged(zoo, mixed), plain)


# Files that are wrong

_BASE = {f"lora_unet_{under(path)}{suffix}": t for path in (Q, "blocks.1.mlp.layer2")
         for suffix, t in ((".lora_up.weight", pair(path)[0]), (".lora_down.weight", pair(path)[1]), (".alpha", torch.tensor(2.0)))}  # fmt: skip


def test_half_the_keys_are_reported(zoo: Host) -> None:
    half = {n: t for n, t in _BASE.items() if "layer2.lora_down" not in n}
    name = write(zoo, "loras", "half.safetensors", half)
    inputs = {"model": ["a", 0], "lora_name": name, "strength_model": 1.0, "strength_clip": 1.0}
    graph = {"lo": {"class_type": "AnimaLoraLoader", "inputs": inputs}, "o": capture("lo", 2, "report")}
    report = zoo.run(loaders() | graph)["report"]
    assert "3 of 5 tensors applied" in report and "incomplete, without .lora_down.weight" in report


@st.composite
def mutated(draw: st.DrawFn) -> dict[str, Tensor]:
    """A LoRA file with a few things done to it."""
    tensors = dict(_BASE)
    for _ in range(draw(st.integers(1, 4))):
        name = draw(st.sampled_from(sorted(tensors)))
        tensor = tensors.pop(name)
        what = draw(st.sampled_from(["drop", "rename", "shape", "dtype", "nan", "suffix", "empty", "scalar"]))
        if what == "rename":
            name = draw(st.text(min_size=1, max_size=40)).replace("\x00", "?") + draw(
                st.sampled_from(["", ".alpha", ".lora_up.weight"])
            )
        elif what == "suffix":
            name = name.rsplit(".lora", 1)[0] + draw(st.sampled_from([".diff", ".hada_w1_a", ".lokr_w1", ".oft_blocks",
                   ".dora_scale", ".a1.weight", ".weight", ".on_input", ".set_weight", ".lora_mid.weight"]))  # fmt: skip
        elif what == "shape":
            tensor = torch.zeros(draw(st.lists(st.integers(1, 7), min_size=1, max_size=4)))
        elif what == "dtype":
            tensor = tensor.to(draw(st.sampled_from([torch.int8, torch.float16, torch.bool, torch.float8_e4m3fn])))
        elif what == "nan":
            tensor = torch.full(tensor.shape, float("nan"))
        elif what == "empty":
            tensor = torch.zeros(0, 4)
        elif what == "scalar":
            tensor = torch.tensor(1.0)
        if what != "drop" and name.isprintable():
            tensors[name] = tensor
    return tensors


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(tensors=mutated())
def test_mutated_files_raise_only_our_errors_and_change_nothing_in_part(
    zoo: Host, tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, Tensor]
) -> None:
    path = Path(tmp_path_factory.getbasetemp()) / "mutated.safetensors"
    save_file({n: t.contiguous() for n, t in tensors.items()}, path)
    model = zoo.run(loaders() | {"om": capture("a", 0, "model")})["model"]
    before = {key: len(patches) for key, patches in model.patches.items()}
    try:
        patched, _, report = zoo.module("nodes.lora").apply_lora(model, None, str(path), 1.0, 1.0)
    except zoo.module("anima.errors").AnimaError:
        patched = None
    assert {key: len(patches) for key, patches in model.patches.items()} == before
    if patched is not None:
        import comfy.lora

        weights = patched.model.state_dict()
        for key, patches in patched.patches.items():
            weight = comfy.lora.calculate_weight(patches, weights[key].clone().float(), key)
            assert weight.shape == weights[key].shape and weight.isfinite().all(), report
