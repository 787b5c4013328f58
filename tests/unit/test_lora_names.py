"""Every spelling of every module of the released architecture leads to that module."""

from __future__ import annotations

import json

import pytest
import torch

from anima.checkpoint.dit import expected_shapes
from anima.checkpoint.layouts import canonical_to_diffusers, diffusers_to_canonical
from anima.config import AnimaConfig
from anima.lora.mapping import sort_lora
from anima.lora.names import dit_names, flatten, split_suffix, text_encoder_names
from anima.text.qwen3 import qwen3_shapes

MODULES = [name.removesuffix(".weight") for name in expected_shapes(AnimaConfig()) if name.endswith(".weight")]
DIT = dit_names(MODULES)
QWEN = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 1,
        "num_key_value_heads": 1, "head_dim": 8}  # fmt: skip
TEXT_MODULES = [name.removeprefix("model.").removesuffix(".weight") for name in qwen3_shapes(QWEN)]
TEXT = text_encoder_names(TEXT_MODULES)


def test_flattened_names_are_unique() -> None:
    assert len(MODULES) > 500
    assert len({flatten(module) for module in MODULES}) == len(MODULES)


@pytest.mark.parametrize(
    "prefix",
    [
        "",
        "diffusion_model.",
        "net.",
        "model.diffusion_model.",
        "transformer.",
        "base_model.model.",
        "base_model.model.transformer.",
    ],
)
def test_dotted_spellings(prefix: str) -> None:
    assert all(DIT.resolve(prefix + module) == module for module in MODULES)


@pytest.mark.parametrize("prefix", ["lora_unet_", "lycoris_", "lora_transformer_"])
def test_underscored_spellings(prefix: str) -> None:
    assert all(DIT.resolve(prefix + flatten(module)) == module for module in MODULES)


@pytest.mark.parametrize("prefix", ["", "transformer.", "base_model.model."])
def test_diffusers_spellings(prefix: str) -> None:
    for module in MODULES:
        name = canonical_to_diffusers(module)
        assert name is not None, module
        assert DIT.resolve(prefix + name) == module
        assert module.startswith("llm_adapter.") or diffusers_to_canonical(name) == module


@pytest.mark.parametrize(
    "mangled", ["blocks.3.adaln_modulation.cross_attn.1", "t.embedder.1.linear.1", "blocks.3.self.attn.q.proj"]
)
def test_names_with_dots_in_the_wrong_places(mangled: str) -> None:
    assert DIT.resolve("diffusion_model." + mangled) in MODULES


@pytest.mark.parametrize("prefix", ["lora_te_", "lora_te1_", "lora_te_model_", "lora_text_encoder_"])
def test_text_encoder_spellings(prefix: str) -> None:
    assert all(TEXT.resolve(prefix + flatten(module)) == module for module in TEXT_MODULES)
    assert all(TEXT.resolve(f"text_encoder.{module}") == module for module in TEXT_MODULES)


def test_unknown_names_resolve_to_nothing() -> None:
    for name in ("lora_unet_down_blocks_0", "blocks.99.self_attn.q_proj", "", "diffusion_model."):
        assert DIT.resolve(name) is None and TEXT.resolve(name) is None


def test_longest_suffix_wins() -> None:
    assert split_suffix("a.lora_A.default.weight") == ("a", ".lora_A.default.weight")
    assert split_suffix("a.alpha") == ("a", ".alpha") and split_suffix("a.bias_of_nothing") is None


def test_fused_qkv_becomes_three_that_share_their_down_projection() -> None:
    up, down = torch.randn(3 * 4, 2), torch.randn(2, 4)
    lora = {"blocks.0.self_attn.qkv.lora_up.weight": up, "blocks.0.self_attn.qkv.lora_down.weight": down}
    modules = sort_lora(lora, DIT, TEXT).dit
    assert set(modules) == {f"blocks.0.self_attn.{x}_proj" for x in "qkv"}
    assert torch.equal(modules["blocks.0.self_attn.k_proj"][".lora_up.weight"], up[4:8])
    assert all(module[".lora_down.weight"] is down for module in modules.values())


def test_peft_rank_stabilisation_is_honoured_and_lycoris_is_not_corrected_twice() -> None:
    key = "blocks.0.mlp.layer1"
    lora = {
        f"{key}.lora_A.weight": torch.ones(16, 4),
        f"{key}.lora_B.weight": torch.ones(4, 16),
        f"{key}.alpha": torch.tensor(8.0),
    }
    plain = sort_lora(lora, DIT, TEXT, {"ss_network_args": json.dumps({"rs_lora": True})}).dit[key]
    assert plain[".alpha"] == 8.0
    stabilised = sort_lora(lora, DIT, TEXT, {"lora_adapter_metadata": json.dumps({"use_rslora": True})}).dit[key]
    assert stabilised[".alpha"] / 16 == 8.0 / 16**0.5
