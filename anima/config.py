"""Every dimension of the model, inferred from tensor shapes alone.

Nothing about the 2B release is assumed: width, depth, heads and ranks are read from the checkpoint,
so that 40-block or narrower files build the network they really hold.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .errors import CheckpointError

Shape = tuple[int, ...]

PATCH_SPATIAL = 2
PATCH_TEMPORAL = 1
MIN_CONTEXT_TOKENS = 512
"""The DiT was trained on contexts right-padded with zeros to this many rows, attended without a mask."""


@dataclass(frozen=True)
class AdapterConfig:
    """Dimensions of the LLM adapter (T5 token ids as queries, Qwen3 states as keys and values)."""

    vocab_size: int = 32128
    source_dim: int = 1024
    model_dim: int = 1024
    target_dim: int = 1024
    num_blocks: int = 6
    head_dim: int = 64
    mlp_dim: int = 4096

    @property
    def num_heads(self) -> int:
        return self.model_dim // self.head_dim


@dataclass(frozen=True)
class AnimaConfig:
    """Dimensions of the diffusion transformer (Cosmos-Predict2 MiniTrainDIT with adaLN-LoRA).

    The RoPE ratios are the NTK extrapolation ratios of the three axes; they are not stored in checkpoints.
    """

    in_channels: int = 16
    out_channels: int = 16
    model_dim: int = 2048
    num_blocks: int = 28
    head_dim: int = 128
    mlp_dim: int = 8192
    context_dim: int = 1024
    adaln_lora_dim: int = 256
    rope_ratio_t: float = 1.0
    rope_ratio_h: float = 4.0
    rope_ratio_w: float = 4.0
    adapter: AdapterConfig | None = AdapterConfig()

    @property
    def num_heads(self) -> int:
        return self.model_dim // self.head_dim

    def describe(self) -> str:
        """One line for logs and reports, e.g. `28 blocks, width 2048, 16 heads x 128`."""
        return f"{self.num_blocks} blocks, width {self.model_dim}, {self.num_heads} heads x {self.head_dim}"


def count_blocks(keys: Iterable[str], prefix: str = "blocks.") -> int:
    """Number of consecutively numbered blocks `{prefix}0.`, `{prefix}1.`, ... among the keys.

    Raises:
        CheckpointError: a number is missing in between, as in a file cut or merged wrongly.
    """
    pattern = re.compile(re.escape(prefix) + r"(\d{1,4})\.")
    indices = {int(match.group(1)) for key in keys if (match := pattern.match(key))}
    missing = sorted(set(range(len(indices))) - indices)
    if missing:
        raise CheckpointError(
            "Transformer blocks are missing from the middle of the checkpoint.",
            found=f"blocks up to {max(indices)}, without {', '.join(map(str, missing[:8]))}",
            expected="blocks numbered 0, 1, 2, ... without a gap",
            fix="Download the file again or repeat the merge that made it.",
        )
    return len(indices)


def adapter_config_from_shapes(shapes: Mapping[str, Shape], prefix: str = "llm_adapter.") -> AdapterConfig:
    """Read the adapter's dimensions from `{prefix}...` tensor shapes (Linear weights are [out, in])."""
    embed = _shape(shapes, f"{prefix}embed.weight", 2)
    block = f"{prefix}blocks.0."
    cross_k = _shape(shapes, f"{block}cross_attn.k_proj.weight", 2)
    config = AdapterConfig(
        vocab_size=embed[0],
        target_dim=embed[1],
        model_dim=_shape(shapes, f"{block}cross_attn.q_proj.weight", 2)[1],
        source_dim=cross_k[1],
        num_blocks=count_blocks(shapes, f"{prefix}blocks."),
        head_dim=_shape(shapes, f"{block}cross_attn.q_norm.weight", 1)[0],
        mlp_dim=_shape(shapes, f"{block}mlp.0.weight", 2)[0],
    )
    _check_heads("LLM adapter", config.model_dim, config.head_dim)
    return config


def config_from_shapes(shapes: Mapping[str, Shape]) -> AnimaConfig:
    """Infer the whole configuration from canonical (prefix-free) tensor names and shapes.

    Args:
        shapes: Tensor name -> shape, names as in the original release without `net.`.

    Raises:
        CheckpointError: a tensor that carries a dimension is missing or has an impossible shape.
    """
    model_dim, patch_features = _shape(shapes, "x_embedder.proj.1.weight", 2)
    patch_area = PATCH_SPATIAL**2 * PATCH_TEMPORAL
    in_channels, rest = divmod(patch_features, patch_area)
    out_features = _shape(shapes, "final_layer.linear.weight", 2)[0]
    if rest or in_channels < 2 or out_features % patch_area:
        raise CheckpointError(
            "The patch embedding does not fit a patch of 2x2 latent pixels.",
            found=f"{patch_features} input and {out_features} output features",
            expected="multiples of 4 (16 latent channels + 1 padding-mask channel: 68 in, 64 out)",
        )
    has_adapter = any(key.startswith("llm_adapter.") for key in shapes)
    config = AnimaConfig(
        in_channels=in_channels - 1,
        out_channels=out_features // patch_area,
        model_dim=model_dim,
        num_blocks=count_blocks(shapes),
        head_dim=_shape(shapes, "blocks.0.self_attn.q_norm.weight", 1)[0],
        mlp_dim=_shape(shapes, "blocks.0.mlp.layer1.weight", 2)[0],
        context_dim=_shape(shapes, "blocks.0.cross_attn.k_proj.weight", 2)[1],
        adaln_lora_dim=_shape(shapes, "blocks.0.adaln_modulation_self_attn.1.weight", 2)[0],
        adapter=adapter_config_from_shapes(shapes) if has_adapter else None,
    )
    _check_heads("DiT", config.model_dim, config.head_dim)
    return config


def _shape(shapes: Mapping[str, Shape], key: str, ndim: int) -> Shape:
    shape = shapes.get(key)
    if shape is None or len(shape) != ndim or min(shape) < 1:
        raise CheckpointError(
            f"The tensor '{key}', which tells the size of the network, is {'missing' if shape is None else 'malformed'}.",
            found="no such tensor" if shape is None else f"shape {list(shape)}",
            expected=f"a non-empty tensor with {ndim} dimensions",
            fix="Download the file again; if it is a quantised file, its layout is not one this pack knows.",
        )
    return shape


def _check_heads(part: str, width: int, head_dim: int) -> None:
    if width % head_dim or head_dim % 2 or head_dim < 6:
        raise CheckpointError(
            f"The attention heads of the {part} do not fit its width.",
            found=f"width {width}, head dimension {head_dim}",
            expected="an even head dimension that divides the width",
        )
