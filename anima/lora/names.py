"""From any trainer's spelling of a module's name to the model's own.

Every spelling is, behind some prefix, either the original or the diffusers path of the module, with dots or
with underscores (or with dots in the wrong places, where a converter guessed). So names are compared with all
dots turned into underscores, against one table.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ..checkpoint.layouts import canonical_to_diffusers

SUFFIXES = (
    ".lora_down.weight", ".lora_up.weight", ".lora_mid.weight", ".lora_A.weight", ".lora_B.weight",
    ".lora_A.default.weight", ".lora_B.default.weight", ".lora_a.weight", ".lora_b.weight",
    ".lora_linear_layer.down.weight", ".lora_linear_layer.up.weight", "_lora.down.weight", "_lora.up.weight",
    ".lora.down.weight", ".lora.up.weight",
    ".alpha", ".dora_scale", ".lora_magnitude_vector", ".lora_magnitude_vector.default.weight", ".rank_pattern",
    ".hada_w1_a", ".hada_w1_b", ".hada_w2_a", ".hada_w2_b", ".hada_t1", ".hada_t2",
    ".lokr_w1", ".lokr_w2", ".lokr_w1_a", ".lokr_w1_b", ".lokr_w2_a", ".lokr_w2_b", ".lokr_t2",
    ".oft_blocks", ".oft_diag", ".oft_R.weight", ".oft_R.default.weight", ".rescale",
    ".a1.weight", ".a2.weight", ".b1.weight", ".b2.weight",
    ".w_norm", ".b_norm", ".diff", ".diff_b", ".set_weight", ".weight", ".on_input", ".scalar",
)  # fmt: skip
"""What trainers append to a module's name, longest match first at use."""

_SUFFIX_ORDER = sorted(SUFFIXES, key=len, reverse=True)

DIT_PREFIXES = (
    "lora_unet_", "lora_transformer_", "lycoris_", "oft_unet_", "lora_dit_", "base_model.model.model.diffusion_model.",
    "base_model.model.diffusion_model.", "base_model.model.transformer.", "base_model.model.net.", "base_model.model.",
    "model.diffusion_model.", "diffusion_model.", "transformer.", "model.net.", "unet.", "model.", "net.", "",
)  # fmt: skip
TEXT_PREFIXES = (
    "lora_te_model_", "lora_te1_model_", "lora_te1_", "lora_te_", "lycoris_te_", "lora_text_encoder_model_",
    "lora_text_encoder_", "text_encoder.base_model.model.model.", "text_encoder.base_model.model.",
    "text_encoder.model.", "text_encoder.", "text_encoders.qwen3_06b.transformer.model.", "qwen3_06b.transformer.model.",
    "text_encoders.", "base_model.model.model.", "base_model.model.", "model.", "",
)  # fmt: skip


def split_suffix(key: str) -> tuple[str, str] | None:
    """Separate a LoRA tensor's name into module part and suffix, or None for a name with no known suffix."""
    for suffix in _SUFFIX_ORDER:
        if key.endswith(suffix):
            return key[: -len(suffix)], suffix
    return None


def flatten(name: str) -> str:
    """A name with its dots as underscores."""
    return name.replace(".", "_")


@dataclass(frozen=True)
class NameTable:
    """Flattened spelling -> module path, for one model."""

    table: dict[str, str]
    prefixes: tuple[str, ...]

    def resolve(self, name: str) -> str | None:
        """Module path behind a trainer's name (without suffix), or None."""
        for prefix in self.prefixes:
            if name.startswith(prefix):
                path = self.table.get(flatten(name[len(prefix) :]))
                if path is not None:
                    return path
        return None


def dit_names(modules: Iterable[str]) -> NameTable:
    """Table for the DiT and its adapter.

    Args:
        modules: Paths of the modules that have weights, e.g. `blocks.0.self_attn.q_proj`.
    """
    table: dict[str, str] = {}
    for path in modules:
        for alias in (path, canonical_to_diffusers(path)):
            if alias is not None:
                table[flatten(alias)] = path
        if path.endswith("self_attn.q_proj"):
            for alias in _fused_aliases(path.removesuffix("q_proj")):
                table[flatten(alias)] = path.removesuffix("q_proj") + "qkv"
    return NameTable(table, DIT_PREFIXES)


def _fused_aliases(attention: str) -> Iterable[str]:
    """Names of a fused query-key-value projection of a self-attention (`blocks.0.self_attn.`)."""
    yield from (attention + name for name in ("qkv", "qkv_proj", "to_qkv"))
    if match := re.match(r"blocks\.(\d+)\.", attention):
        yield f"transformer_blocks.{match[1]}.attn1.to_qkv"


def text_encoder_names(modules: Iterable[str]) -> NameTable:
    """Table for Qwen3.

    Args:
        modules: Paths below `model.`, e.g. `layers.0.self_attn.q_proj`.
    """
    return NameTable({flatten(path): path for path in modules}, TEXT_PREFIXES)
