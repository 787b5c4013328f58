"""What a file is, told from its tensor names and shapes alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..config import Shape
from .layouts import (
    ADAPTER_SIGNATURE,
    find_adapter_prefix,
    find_dit_prefix,
    find_text_encoder_prefix,
    is_diffusers_dit,
    is_wan_vae,
)

Shapes = Mapping[str, Shape]


@dataclass(frozen=True)
class Kind:
    """`slug` for programs, `name` for people, `usable_as` the slots it fits."""

    slug: str
    name: str
    usable_as: frozenset[str] = frozenset()


def _any_key(*parts: str) -> Callable[[Shapes], bool]:
    return lambda shapes: any(part in key for key in shapes for part in parts)


def _has(*keys: str) -> Callable[[Shapes], bool]:
    """True when every name occurs, at the start or after a dot (whatever the prefix)."""
    return lambda shapes: all(any(key == k or key.endswith("." + k) for key in shapes) for k in keys)


LORA_MARKS = (
    ".lora_down.", ".lora_up.", ".lora_A.", ".lora_B.", ".lora_a.", ".lora_b.", ".hada_w1_a", ".lokr_w1", ".lokr_w2",
    ".oft_blocks", ".oft_diag", ".dora_scale", ".a1.weight", ".diff_b", ".lora.up.", ".lora.down.", ".oft_R.",
)  # fmt: skip
LORA_ENDINGS = (".diff", ".w_norm", ".on_input", ".set_weight")

_LORA_BASES: tuple[tuple[str, str, Callable[[Shapes], bool]], ...] = (
    ("lora_sdxl", "an SDXL or Stable Diffusion LoRA", _any_key("lora_unet_input_blocks", "lora_unet_down_blocks",
     "lora_unet_mid_block", "lora_unet_output_blocks", "lora_unet_up_blocks", "lora_te2_", "unet.down_blocks",
     "unet.mid_block", "lora_te1_text_model", "lora_te_text_model", "unet.up_blocks")),
    ("lora_flux", "a Flux LoRA", _any_key("double_blocks", "single_blocks", "single_transformer_blocks")),
    ("lora_qwen_image", "a Qwen-Image LoRA", _any_key("attn.add_q_proj", "attn_add_q_proj", "img_mlp.net", "img_mlp_net")),
    ("lora_wan", "a Wan video LoRA", _any_key("blocks.0.ffn.", "blocks_0_ffn_", ".self_attn.q.", "_self_attn_q.")),
    ("lora_zimage", "a Lumina or Z-Image LoRA", _any_key("layers.0.feed_forward", "layers_0_feed_forward")),
)  # fmt: skip


def _is_lora(shapes: Shapes) -> bool:
    return any(key.endswith(LORA_ENDINGS) or any(mark in key for mark in LORA_MARKS) for key in shapes)


def _is_bundle(shapes: Shapes) -> bool:
    has_dit = find_dit_prefix(shapes) is not None
    others = ("first_stage_model.", "vae.", "text_encoders.", "cond_stage_model.")
    return has_dit and any(key.startswith(others) for key in shapes)


def _is_anima_dit(shapes: Shapes) -> bool:
    prefix = find_dit_prefix(shapes)
    return prefix is not None and prefix + ADAPTER_SIGNATURE in shapes


_KINDS: tuple[tuple[Kind, Callable[[Shapes], bool]], ...] = (
    (Kind("lllite", "an Anima LLLite control model"), _any_key("lllite_dit_blocks", "lllite_dit.", "lllite_conditioning")),
    (Kind("bundle", "an all-in-one Anima checkpoint", frozenset({"dit", "bundle"})), _is_bundle),
    (Kind("anima_dit", "an Anima DiT", frozenset({"dit"})), _is_anima_dit),
    (Kind("anima_dit_diffusers", "an Anima DiT in diffusers layout", frozenset({"dit"})), is_diffusers_dit),
    (Kind("cosmos_predict2", "a Cosmos-Predict2 DiT without an LLM adapter", frozenset({"dit_without_adapter"})),
     lambda shapes: find_dit_prefix(shapes) is not None),
    (Kind("anima_adapter", "an Anima LLM adapter", frozenset({"adapter"})),
     lambda shapes: find_adapter_prefix(shapes) is not None),
    (Kind("wan_vae", "a Wan 2.1 / Qwen-Image VAE", frozenset({"vae"})), is_wan_vae),
    (Kind("wan22_vae", "a Wan 2.2 VAE (48 channels)"), _has("decoder.middle.0.residual.0.gamma", "decoder.upsamples.0.upsamples.0.residual.2.weight")),
    (Kind("wan_vae_other", "a Wan-style VAE with other dimensions"), _has("decoder.middle.0.residual.0.gamma")),
    (Kind("qwen3", "a Qwen3 text encoder", frozenset({"text_encoder"})),
     lambda shapes: find_text_encoder_prefix(shapes) is not None),
    (Kind("llm", "a language model other than Qwen3-0.6B"), _has("layers.0.self_attn.q_proj.weight", "layers.0.mlp.gate_proj.weight")),
    (Kind("t5", "a T5 text encoder"), _has("encoder.block.0.layer.0.SelfAttention.q.weight")),
    (Kind("clip", "a CLIP text encoder"), _any_key("text_model.encoder.layers.0", "transformer.resblocks.0")),
    (Kind("sdxl", "an SDXL or Stable Diffusion checkpoint"), _any_key("input_blocks.0.0.weight", "down_blocks.0.resnets.0", "output_blocks.0.0")),
    (Kind("sd_vae", "an SD, SDXL or Flux VAE"), _has("decoder.conv_in.weight", "decoder.conv_out.weight")),
    (Kind("qwen_image", "a Qwen-Image DiT"), _has("transformer_blocks.0.attn.add_q_proj.weight")),
    (Kind("sd3", "a Stable Diffusion 3 checkpoint"), _has("joint_blocks.0.x_block.attn.qkv.weight")),
    (Kind("flux", "a Flux checkpoint"), _any_key("double_blocks.0.", "single_transformer_blocks.0.")),
    (Kind("wan", "a Wan video DiT"), _has("blocks.0.ffn.0.weight", "patch_embedding.weight")),
    (Kind("cosmos1", "a Cosmos 1 DiT"), _has("blocks.block0.blocks.0.block.attn.to_q.0.weight")),
    (Kind("lumina", "a Lumina 2 or Z-Image DiT"), _has("layers.0.feed_forward.w1.weight", "cap_embedder.0.weight")),
    (Kind("embedding", "a textual inversion embedding"), lambda shapes: len(shapes) <= 2
     and any(key in shapes for key in ("qwen3_06b", "emb_params", "clip_g", "clip_l"))),
)  # fmt: skip

UNKNOWN = Kind("unknown", "a safetensors file of an unknown kind")
EMPTY = Kind("empty", "a safetensors file without tensors")


def identify(shapes: Shapes) -> Kind:
    """Name what a file with these tensors is.

    Args:
        shapes: Tensor name -> shape, as in the file.
    """
    if not shapes:
        return EMPTY
    if _is_lora(shapes) and not any("lllite" in key for key in shapes):
        for slug, name, test in _LORA_BASES:
            if test(shapes):
                return Kind(slug, name)
        if any("blocks" in key for key in shapes):
            return Kind("lora_anima", "an Anima LoRA", frozenset({"lora"}))
        return Kind("lora_other", "a LoRA for another base model")
    return next((kind for kind, test in _KINDS if test(shapes)), UNKNOWN)
