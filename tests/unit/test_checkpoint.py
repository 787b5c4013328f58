"""Config from shapes, layouts, kinds, and the plan of a load."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import save_file

from anima.checkpoint.dit import expected_shapes, plan_dit
from anima.checkpoint.kinds import identify
from anima.checkpoint.layouts import DIT_PREFIXES
from anima.config import AdapterConfig, AnimaConfig, config_from_shapes
from anima.errors import AnimaError, CheckpointError, WrongKindError

RELEASED = AnimaConfig()


@pytest.mark.parametrize(
    "config",
    [RELEASED, tiny.CONFIG, replace(RELEASED, num_blocks=40), replace(RELEASED, model_dim=1024, mlp_dim=4096),
     replace(tiny.CONFIG, adapter=None), replace(RELEASED, adapter=AdapterConfig(num_blocks=3)),
     replace(tiny.CONFIG, adaln_lora_dim=7, head_dim=24)],
    ids=lambda config: config.describe(),
)  # fmt: skip
def test_config_is_read_back_from_shapes(config: AnimaConfig) -> None:
    assert config_from_shapes(expected_shapes(config)) == config


def test_40_blocks_are_not_built_as_28() -> None:
    shapes = expected_shapes(replace(RELEASED, num_blocks=40))
    assert config_from_shapes(shapes).num_blocks == 40


def test_released_architecture_has_the_released_size() -> None:
    shapes = expected_shapes(RELEASED)
    parameters = sum(torch.Size(shape).numel() for shape in shapes.values())
    assert 2.0e9 < parameters < 2.2e9
    assert shapes["x_embedder.proj.1.weight"] == (2048, 68)
    assert shapes["blocks.27.adaln_modulation_mlp.2.weight"] == (6144, 256)
    assert shapes["llm_adapter.embed.weight"] == (32128, 1024)


@pytest.fixture
def dit(tmp_path: Path):
    def write(tensors: dict[str, torch.Tensor], name: str = "model.safetensors") -> Path:
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, tmp_path / name)
        return tmp_path / name

    return write


@pytest.mark.parametrize("prefix", DIT_PREFIXES)
def test_every_prefix_loads(dit, prefix: str) -> None:
    plan = plan_dit(dit(tiny.prefixed(tiny.dit(), prefix)))
    assert plan.prefix == prefix and plan.config == tiny.CONFIG
    assert set(plan.sources[0].rename.values()) == set(expected_shapes(tiny.CONFIG))


def test_buffers_that_are_no_weights_are_left_out_knowingly(dit) -> None:
    extra = {"net.pos_embedder.seq": torch.zeros(8), "net.blocks.0.self_attn._extra_state": torch.zeros(1),
             "net.model_sampling.sigmas": torch.zeros(4)}  # fmt: skip
    plan = plan_dit(dit(tiny.prefixed(tiny.dit(), "net.") | extra))
    assert set(plan.dropped) == set(extra) and "pos_embedder" in plan.report()


def test_adapter_from_another_file(dit) -> None:
    bare = {name: t for name, t in tiny.dit().items() if not name.startswith("llm_adapter.")}
    model = dit(tiny.prefixed(bare, "net."), "bare.safetensors")
    adapter = {n.removeprefix("llm_adapter."): t for n, t in tiny.dit(seed=9).items() if n.startswith("llm_adapter.")}
    for name, tensors in {
        "alone": adapter,
        "prefixed": tiny.prefixed(adapter, "llm_adapter."),
        "whole": tiny.dit(seed=9),
    }.items():
        plan = plan_dit(model, dit(tensors, f"{name}.safetensors"))
        assert plan.config == tiny.CONFIG and f"{name}.safetensors" in plan.report()


def test_dit_without_llm_adapter_is_an_error(dit) -> None:
    bare = {name: t for name, t in tiny.dit().items() if not name.startswith("llm_adapter.")}
    with pytest.raises(WrongKindError, match="no LLM adapter"):
        plan_dit(dit(bare))


def broken(change: str) -> dict[str, torch.Tensor]:
    tensors = tiny.dit()
    if change == "one missing":
        del tensors["blocks.1.mlp.layer2.weight"]
    elif change == "one surplus":
        tensors["blocks.1.mlp.layer3.weight"] = torch.zeros(2, 2)
    elif change == "one wrong shape":
        tensors["blocks.1.mlp.layer2.weight"] = torch.zeros(96, 100)
    elif change == "middle block missing":
        tensors = {n: t for n, t in tensors.items() if not n.startswith("blocks.1.")}
    elif change == "last block incomplete":  # the 27-block file with 20 keys missing
        tensors = {n: t for n, t in tensors.items() if not (n.startswith("blocks.2.") and "attn" in n)}
    elif change == "adapter block missing":
        tensors = {n: t for n, t in tensors.items() if not n.startswith("llm_adapter.blocks.1.mlp")}
    return tensors


@pytest.mark.parametrize(
    "change,said",
    [("one missing", "blocks.1.mlp.layer2.weight"), ("one surplus", "blocks.1.mlp.layer3.weight"),
     ("one wrong shape", "[96, 100] instead of [96, 384]"), ("middle block missing", "without 1"),
     ("last block incomplete", "blocks.2."), ("adapter block missing", "llm_adapter.blocks.1.mlp")],
)  # fmt: skip
def test_incomplete_files_are_named(dit, change: str, said: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        plan_dit(dit(broken(change)))
    assert said in str(caught.value) and "model.safetensors" in str(caught.value)


FOREIGN = {
    "an SDXL": ["model.diffusion_model.input_blocks.0.0.weight", "first_stage_model.decoder.conv_in.weight"],
    "a Flux checkpoint": ["double_blocks.0.img_attn.qkv.weight", "single_blocks.0.linear1.weight"],
    "a Wan video DiT": ["blocks.0.ffn.0.weight", "patch_embedding.weight", "blocks.0.self_attn.q.weight"],
    "an Anima LoRA": ["lora_unet_blocks_0_self_attn_q_proj.lora_down.weight"],
    "an SDXL or Stable Diffusion LoRA": ["lora_unet_down_blocks_0_attentions_0.lora_down.weight"],
    "a Flux LoRA": ["transformer.single_transformer_blocks.0.attn.to_q.lora_A.weight"],
    "a T5": ["encoder.block.0.layer.0.SelfAttention.q.weight"],
    "a CLIP": ["text_model.encoder.layers.0.self_attn.q_proj.weight"],
    "a Qwen-Image DiT": ["transformer_blocks.0.attn.add_q_proj.weight"],
    "a Stable Diffusion 3": ["model.diffusion_model.joint_blocks.0.x_block.attn.qkv.weight"],
    "an SD, SDXL or Flux VAE": ["decoder.conv_in.weight", "decoder.conv_out.weight"],
    "a language model other": ["model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.gate_proj.weight"],
    "LLLite": ["lllite_dit_blocks_0_self_attn_q_proj.down.weight"],
    "unknown kind": ["something.weight"],
}


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_files_are_named_for_what_they_are(dit, name: str) -> None:
    with pytest.raises(WrongKindError) as caught:
        plan_dit(dit({key: torch.zeros(4, 4) for key in FOREIGN[name]}))
    assert name in str(caught.value)


def test_own_kinds_are_recognised() -> None:
    shapes = {
        "anima_dit": tiny.prefixed(tiny.dit(), "net."),
        "qwen3": tiny.text_encoder(),
        "wan_vae": tiny.vae(),
        "bundle": tiny.prefixed(tiny.dit(), "model.diffusion_model.") | tiny.prefixed(tiny.vae(), "first_stage_model."),
    }
    for slug, tensors in shapes.items():
        assert identify({name: tuple(t.shape) for name, t in tensors.items()}).slug == slug


def test_every_error_names_file_found_expected_and_remedy(dit) -> None:
    with pytest.raises(AnimaError) as caught:
        plan_dit(dit({"something.weight": torch.zeros(1)}))
    for part in ("File:", "Found:", "Expected:", "What to do:"):
        assert part in str(caught.value)
