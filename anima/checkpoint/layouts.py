"""How tensors are named in the files people have, and the way back to the names of the original release.

A `Layout` is a plain renaming: file name -> canonical name, where canonical means the module names of
`anima.transformer` (the original release without its `net.` prefix).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..config import Shape

Keys = Iterable[str]

DIT_PREFIXES = (
    "model.diffusion_model.", "model.net.", "diffusion_model.", "transformer.", "module.", "model.", "net.", "",
)  # fmt: skip
"""Longest first, so that `model.` does not win over `model.diffusion_model.`."""

DIT_SIGNATURE = ("x_embedder.proj.1.weight", "blocks.0.cross_attn.q_norm.weight")
ADAPTER_SIGNATURE = "llm_adapter.blocks.0.cross_attn.q_proj.weight"
_ADAPTER_INNER = ("blocks.0.cross_attn.q_proj.weight", "embed.weight", "out_proj.weight")
ADAPTER_PREFIXES = (*tuple(p + "llm_adapter." for p in DIT_PREFIXES), "text_conditioner.", "")

_TEXT_ENCODER_PREFIXES = (
    "text_encoders.qwen3_06b.transformer.model.", "cond_stage_model.qwen3_06b.transformer.model.",
    "qwen3_06b.transformer.model.", "text_encoder.model.", "text_encoder.", "model.", "",
)  # fmt: skip
_VAE_PREFIXES = ("first_stage_model.", "vae.", "model.", "")
_WAN_VAE_SIGNATURE = ("decoder.head.0.gamma", "encoder.conv1.weight", "decoder.middle.0.residual.0.gamma")
_DIFFUSERS_VAE_SIGNATURE = ("decoder.conv_in.weight", "decoder.mid_block.resnets.0.norm1.gamma")

_NOT_WEIGHTS = re.compile(
    r"(^|\.)(pos_embedder|model_sampling|_extra_state|rotary_emb\.inv_freq|accum_\w+|logvar)(\.|$)"
)
"""Buffers that some files carry and the model derives by itself."""

_ATTENTIONS = (("attn1", "self_attn"), ("attn2", "cross_attn"))
_NORMS = (("norm1", "self_attn"), ("norm2", "cross_attn"), ("norm3", "mlp"))
_DIFFUSERS_MODULES: tuple[tuple[str, str], ...] = (
    ("patch_embed.proj", "x_embedder.proj.1"),
    ("time_embed.t_embedder.linear_1", "t_embedder.1.linear_1"),
    ("time_embed.t_embedder.linear_2", "t_embedder.1.linear_2"),
    ("time_embed.norm", "t_embedding_norm"),
    ("norm_out.linear_1", "final_layer.adaln_modulation.1"),
    ("norm_out.linear_2", "final_layer.adaln_modulation.2"),
    ("proj_out", "final_layer.linear"),
    ("transformer_blocks.N.ff.net.0.proj", "blocks.N.mlp.layer1"),
    ("transformer_blocks.N.ff.net.2", "blocks.N.mlp.layer2"),
    *((f"transformer_blocks.N.{a}.to_{x}", f"blocks.N.{b}.{x}_proj") for a, b in _ATTENTIONS for x in "qkv"),
    *((f"transformer_blocks.N.{a}.norm_{x}", f"blocks.N.{b}.{x}_norm") for a, b in _ATTENTIONS for x in "qk"),
    *((f"transformer_blocks.N.{a}.to_out.0", f"blocks.N.{b}.output_proj") for a, b in _ATTENTIONS),
    *((f"transformer_blocks.N.{a}.linear_{x}", f"blocks.N.adaln_modulation_{b}.{x}") for a, b in _NORMS for x in "12"),
)
"""Module paths of diffusers' CosmosTransformer3DModel and of the original; N is the block's number."""
_TO_CANONICAL = dict(_DIFFUSERS_MODULES)
_TO_DIFFUSERS = {canonical: diffusers for diffusers, canonical in _DIFFUSERS_MODULES}


def _translate(module: str, table: Mapping[str, str]) -> str | None:
    number = re.match(r"(?:transformer_)?blocks\.(\d+)\.", module)
    template = module if number is None else module.replace(f".{number[1]}.", ".N.", 1)
    found = table.get(template)
    return found if found is None or number is None else found.replace(".N.", f".{number[1]}.", 1)


def diffusers_to_canonical(module: str) -> str | None:
    """Canonical path of a diffusers DiT module, None when there is none."""
    return _translate(module, _TO_CANONICAL)


def canonical_to_diffusers(module: str) -> str | None:
    """Diffusers path of a canonical DiT module; the adapter's modules are found under `text_conditioner.`."""
    if module.startswith("llm_adapter."):
        return "text_conditioner." + module.removeprefix("llm_adapter.")
    return _translate(module, _TO_DIFFUSERS)


@dataclass(frozen=True)
class Layout:
    """`rename` maps file names to canonical names; `dropped` lists what the model does not need."""

    name: str
    prefix: str
    rename: dict[str, str]
    dropped: tuple[str, ...] = ()

    def canonical_shapes(self, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        return {new: shapes[old] for old, new in self.rename.items()}


def _find_prefix(keys: Keys, prefixes: Iterable[str], signature: Iterable[str]) -> str | None:
    keys = keys if isinstance(keys, (set, dict, Mapping)) else set(keys)
    return next((p for p in prefixes if all(p + name in keys for name in signature)), None)


def find_dit_prefix(keys: Keys) -> str | None:
    """Prefix of the DiT's tensors in the original layout, or None when this is no such DiT."""
    return _find_prefix(keys, DIT_PREFIXES, DIT_SIGNATURE)


def find_adapter_prefix(keys: Keys) -> str | None:
    """Prefix of the LLM adapter's tensors (`embed.weight`, `blocks.0...`), or None."""
    return _find_prefix(keys, ADAPTER_PREFIXES, _ADAPTER_INNER)


def find_text_encoder_prefix(shapes: Mapping[str, Shape] | Keys) -> str | None:
    """Prefix of Qwen3's tensors (`embed_tokens.weight`, `layers.0...`), or None."""
    signature = ("embed_tokens.weight", "layers.0.self_attn.q_norm.weight", "layers.0.mlp.gate_proj.weight")
    return _find_prefix(shapes, _TEXT_ENCODER_PREFIXES, signature)


def find_vae_prefix(keys: Keys) -> str | None:
    """Prefix of a Wan VAE's tensors in the original or the diffusers layout, or None."""
    prefix = _find_prefix(keys, _VAE_PREFIXES, _WAN_VAE_SIGNATURE)
    return prefix if prefix is not None else _find_prefix(keys, _VAE_PREFIXES, _DIFFUSERS_VAE_SIGNATURE)


def is_wan_vae(shapes: Mapping[str, Shape]) -> bool:
    """A 16-channel Wan 2.1 VAE in either layout (Wan 2.2's has 48 channels and nested upsamplers)."""
    prefix = find_vae_prefix(shapes)
    if prefix is None:
        return False
    first = shapes.get(prefix + "decoder.conv1.weight") or shapes.get(prefix + "decoder.conv_in.weight")
    return first is not None and len(first) == 5 and first[1] == 16


def is_diffusers_dit(keys: Keys) -> bool:
    """A Cosmos-Predict2 DiT in diffusers' naming (CosmosTransformer3DModel)."""
    return _find_prefix(keys, ("transformer.", ""), _DIFFUSERS_SIGNATURE) is not None


_DIFFUSERS_SIGNATURE = (
    "patch_embed.proj.weight",
    "transformer_blocks.0.norm1.linear_1.weight",
    "time_embed.norm.weight",
)


def dit_layout(shapes: Mapping[str, Shape]) -> Layout | None:
    """The renaming for a file that holds a DiT (with or without its adapter), or None.

    Tensors outside the DiT's prefix (a bundle's VAE, say) are not part of it and not listed as dropped.
    """
    prefix = find_dit_prefix(shapes)
    if prefix is not None:
        inner = {key: key[len(prefix) :] for key in shapes if key.startswith(prefix)}
        dropped = tuple(key for key, name in inner.items() if _NOT_WEIGHTS.search(name))
        rename = {key: name for key, name in inner.items() if key not in dropped}
        if not prefix:
            rename = {key: name for key, name in rename.items() if not name.startswith(("vae.", "text_encoders."))}
        return Layout("original", prefix, rename, dropped)
    prefix = _find_prefix(shapes, ("transformer.", ""), _DIFFUSERS_SIGNATURE)
    if prefix is None:
        return None
    rename, dropped_keys = {}, []
    for key in shapes:
        name = key.removeprefix(prefix)
        if key.startswith("text_conditioner."):
            rename[key] = "llm_adapter." + key.removeprefix("text_conditioner.")
        elif _NOT_WEIGHTS.search(name):
            dropped_keys.append(key)
        else:
            module, dot, parameter = name.rpartition(".")
            rename[key] = (diffusers_to_canonical(module) or module) + dot + parameter
    return Layout("diffusers", prefix, rename, tuple(dropped_keys))


def adapter_layout(shapes: Mapping[str, Shape]) -> Layout | None:
    """The renaming for a file that holds an LLM adapter, alone or inside a DiT; names get `llm_adapter.`."""
    prefix = find_adapter_prefix(shapes)
    if prefix is None:
        return None
    inner = {key: key[len(prefix) :] for key in shapes if key.startswith(prefix)}
    dropped = tuple(key for key, name in inner.items() if _NOT_WEIGHTS.search(name))
    rename = {key: "llm_adapter." + name for key, name in inner.items() if key not in dropped}
    return Layout("adapter", prefix, rename, dropped)


def text_encoder_layout(shapes: Mapping[str, Shape]) -> Layout | None:
    """The renaming for Qwen3 to `model.*`, as in `qwen_3_06b_base.safetensors`; an lm_head is dropped."""
    prefix = find_text_encoder_prefix(shapes)
    if prefix is None:
        return None
    inner = {key: key[len(prefix) :] for key in shapes if key.startswith(prefix)}
    heads = tuple(key for key in shapes if key.endswith("lm_head.weight"))
    dropped = tuple(k for k, name in inner.items() if _NOT_WEIGHTS.search(name)) + heads
    return Layout("qwen3", prefix, {k: "model." + name for k, name in inner.items() if k not in dropped}, dropped)


_VAE_PARTS = (
    (r"^quant_conv\.", "conv1."),
    (r"^post_quant_conv\.", "conv2."),
    (r"^(encoder|decoder)\.conv_in\.", r"\1.conv1."),
    (r"^(encoder|decoder)\.conv_out\.", r"\1.head.2."),
    (r"^(encoder|decoder)\.norm_out\.", r"\1.head.0."),
    (r"\.mid_block\.attentions\.0\.", ".middle.1."),
    (r"\.mid_block\.resnets\.0\.", ".middle.0."),
    (r"\.mid_block\.resnets\.1\.", ".middle.2."),
    (r"^encoder\.down_blocks\.(\d+)\.", r"encoder.downsamples.\1."),
    (r"\.conv_shortcut\.", ".shortcut."),
)
_VAE_RESNET = {"norm1": "residual.0", "conv1": "residual.2", "norm2": "residual.3", "conv2": "residual.6"}


def vae_to_original(name: str) -> str:
    """Name of a tensor of diffusers' AutoencoderKLWan / AutoencoderKLQwenImage -> original Wan name.

    A stage of the decoder has three residual blocks and an upsampler, numbered through in the original.
    """
    up = re.match(r"^decoder\.up_blocks\.(\d+)\.(?:resnets\.(\d+)|upsamplers\.0)\.", name)
    if up:
        name = f"decoder.upsamples.{4 * int(up[1]) + int(up[2] or 3)}." + name[up.end() :]
    for pattern, replacement in _VAE_PARTS:
        name = re.sub(pattern, replacement, name)
    head, _, rest = name.rpartition(".")
    stem, _, last = head.rpartition(".")
    in_resnet = ".downsamples." in name or ".upsamples." in name or ".middle." in name
    return f"{stem}.{_VAE_RESNET[last]}.{rest}" if in_resnet and last in _VAE_RESNET else name
