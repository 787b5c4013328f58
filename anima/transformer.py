"""The Anima diffusion transformer, readable top to bottom: NVIDIA Cosmos-Predict2's MiniTrainDIT with
adaLN-LoRA modulation, plus the LLM adapter.

Submodule names are those of the checkpoint, so `load_state_dict(strict=True)` needs no renaming.
What differs between hosts is passed in: `operations` (layer classes) and `attention`.

Shapes: B batch, C latent channels, T H W latent size, t h w token grid, N context rows, D width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from einops.layers.torch import Rearrange
from torch import Tensor, nn

from .adapter import LLMAdapter, finish_context
from .config import PATCH_SPATIAL, PATCH_TEMPORAL, AnimaConfig
from .operations import TorchOperations, sdpa
from .rope import rope_table, rotate

NORM_EPS = 1e-6
AttentionFn = Callable[..., Tensor]
Options = dict[str, Any]
"""ComfyUI's `transformer_options`; the keys honoured are listed at `AnimaTransformer.forward`."""


def timestep_features(timesteps: Tensor, dim: int) -> Tensor:
    """Sinusoidal features, cosines first. timesteps: (B, T) in (0, 1] -> float32 (B, T, dim)."""
    half = dim // 2
    frequencies = torch.exp(-math.log(10000) * torch.arange(half, dtype=torch.float32, device=timesteps.device) / half)
    angles = timesteps.float()[..., None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


class TimestepFeatures(nn.Module):
    """Parameter-free first element of `t_embedder`."""

    def __init__(self, dim: int):
        super().__init__()
        self.dim = dim

    def forward(self, timesteps: Tensor) -> Tensor:
        return timestep_features(timesteps, self.dim)


class TimestepEmbedding(nn.Module):
    """Maps timestep features to the adaLN-LoRA base shared by all blocks: (B, T, D) -> (B, T, 3D)."""

    def __init__(self, dim: int, operations: Any, **factory: Any):
        super().__init__()
        self.linear_1 = operations.Linear(dim, dim, bias=False, **factory)
        self.activation = nn.SiLU()
        self.linear_2 = operations.Linear(dim, 3 * dim, bias=False, **factory)

    def forward(self, features: Tensor) -> Tensor:
        return self.linear_2(self.activation(self.linear_1(features)))


class PatchEmbed(nn.Module):
    """(B, C+1, T, H, W) -> (B, t, h, w, D), features of a patch in the order (c r m n)."""

    def __init__(self, in_channels: int, dim: int, operations: Any, **factory: Any):
        super().__init__()
        self.proj = nn.Sequential(
            Rearrange("b c (t r) (h m) (w n) -> b t h w (c r m n)", r=PATCH_TEMPORAL, m=PATCH_SPATIAL, n=PATCH_SPATIAL),
            operations.Linear(in_channels * PATCH_TEMPORAL * PATCH_SPATIAL**2, dim, bias=False, **factory),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x)


def modulation(dim: int, rank: int, chunks: int, operations: Any, **factory: Any) -> nn.Sequential:
    """adaLN-LoRA: silu -> D -> rank -> chunks*D."""
    return nn.Sequential(
        nn.SiLU(),
        operations.Linear(dim, rank, bias=False, **factory),
        operations.Linear(rank, chunks * dim, bias=False, **factory),
    )


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """LayerNorm without affine, then scale and shift. x: (B, t, h, w, D); shift, scale: (B, T, 1, 1, D)."""
    return F.layer_norm(x, x.shape[-1:], eps=NORM_EPS) * (1 + scale) + shift


class Attention(nn.Module):
    """Self- or cross-attention with QK RMSNorm; RoPE follows the norm, on self-attention only."""

    def __init__(
        self, dim: int, context_dim: int, config: AnimaConfig, is_self: bool, operations: Any, attention: AttentionFn,
        **factory: Any,
    ):  # fmt: skip
        super().__init__()
        self.is_self = is_self
        self.heads, self.head_dim = config.num_heads, config.head_dim
        self.attention = attention
        self.q_proj = operations.Linear(dim, dim, bias=False, **factory)
        self.q_norm = operations.RMSNorm(config.head_dim, eps=NORM_EPS, **factory)
        self.k_proj = operations.Linear(context_dim, dim, bias=False, **factory)
        self.k_norm = operations.RMSNorm(config.head_dim, eps=NORM_EPS, **factory)
        self.v_proj = operations.Linear(context_dim, dim, bias=False, **factory)
        self.output_proj = operations.Linear(dim, dim, bias=False, **factory)

    def forward(self, x: Tensor, context: Tensor, rope: Tensor, options: Options) -> Tensor:
        """x: (B, L, D), context: (B, N, context_dim), rope: (1, L, 1, head_dim/2, 2, 2) -> (B, L, D)."""
        q_in, k_in, v_in, rope = self._apply_input_patches(x, context, rope, options)
        q = self.q_norm(self._split(self.q_proj(q_in)))
        k = self.k_norm(self._split(self.k_proj(k_in)))
        v = self._split(self.v_proj(v_in))
        if self.is_self:
            q, k = rotate(q, rope), rotate(k, rope)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return self.output_proj(self.attention(q, k, v, self.heads, transformer_options=options))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, self.head_dim))

    def _apply_input_patches(self, x: Tensor, context: Tensor, rope: Tensor, options: Options):
        patches = options.get("patches", {}).get("attn1_patch" if self.is_self else "attn2_patch")
        q, k, v = x, context, context
        for patch in patches or ():
            extra = {**options, "n_heads": self.heads, "dim_head": self.head_dim}
            out = patch(q, k, v, pe=rope, attn_mask=None, extra_options=extra)
            q, k, v, rope = out.get("q", q), out.get("k", k), out.get("v", v), out.get("pe", rope)
        return q, k, v, rope


class FeedForward(nn.Module):
    """GELU MLP without biases."""

    def __init__(self, dim: int, hidden_dim: int, operations: Any, **factory: Any):
        super().__init__()
        self.activation = nn.GELU()
        self.layer1 = operations.Linear(dim, hidden_dim, bias=False, **factory)
        self.layer2 = operations.Linear(hidden_dim, dim, bias=False, **factory)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer2(self.activation(self.layer1(x)))


class Block(nn.Module):
    """Self-attention, cross-attention and MLP, each modulated, gated and added to the residual stream.

    The stream keeps its own dtype (float32 when computing in float16, which would overflow);
    attention and MLP run in the dtype of the timestep embedding.
    """

    def __init__(self, config: AnimaConfig, operations: Any, attention: AttentionFn, **factory: Any):
        super().__init__()
        dim, rank = config.model_dim, config.adaln_lora_dim
        self.self_attn = Attention(dim, dim, config, True, operations, attention, **factory)
        self.cross_attn = Attention(dim, config.context_dim, config, False, operations, attention, **factory)
        self.mlp = FeedForward(dim, config.mlp_dim, operations, **factory)
        self.adaln_modulation_self_attn = modulation(dim, rank, 3, operations, **factory)
        self.adaln_modulation_cross_attn = modulation(dim, rank, 3, operations, **factory)
        self.adaln_modulation_mlp = modulation(dim, rank, 3, operations, **factory)

    def forward(
        self, x: Tensor, embedding: Tensor, adaln_base: Tensor, context: Tensor, rope: Tensor, options: Options
    ) -> Tensor:
        """x: (B, t, h, w, D), embedding: (B, T, D), adaln_base: (B, T, 3D), context: (B, N, C) -> like x."""
        _, t, h, w, _ = x.shape
        dtype = embedding.dtype

        def terms(layer: nn.Module) -> tuple[Tensor, ...]:
            shift, scale, gate = (layer(embedding) + adaln_base)[:, :, None, None].chunk(3, dim=-1)
            return shift, scale, gate

        def attend(attention: Attention, modulated: Tensor, source: Tensor | None, output_patch: str) -> Tensor:
            tokens = modulated.to(dtype).flatten(1, 3)
            out = attention(tokens, tokens if source is None else source, rope, options)
            for patch in options.get("patches", {}).get(output_patch, ()):
                out = patch(out, {**options, "n_heads": attention.heads, "dim_head": attention.head_dim})
            return out.unflatten(1, (t, h, w))

        def add(stream: Tensor, gate: Tensor, out: Tensor) -> Tensor:
            return torch.addcmul(stream, gate.to(stream.dtype), out.to(stream.dtype))

        shift, scale, gate = terms(self.adaln_modulation_self_attn)
        x = add(x, gate, attend(self.self_attn, modulate(x, shift, scale), None, "attn1_output_patch"))

        shift, scale, gate = terms(self.adaln_modulation_cross_attn)
        x = add(x, gate, attend(self.cross_attn, modulate(x, shift, scale), context, "attn2_output_patch"))

        shift, scale, gate = terms(self.adaln_modulation_mlp)
        args = {"x": modulate(x, shift, scale).to(dtype), "transformer_options": options}
        for patch in options.get("patches", {}).get("mlp_patch", ()):
            args = patch(args)
        return add(x, gate, self.mlp(args["x"]))


class FinalLayer(nn.Module):
    """Modulated LayerNorm and projection to patches: (B, t, h, w, D) -> (B, t, h, w, out*4)."""

    def __init__(self, config: AnimaConfig, operations: Any, **factory: Any):
        super().__init__()
        dim = config.model_dim
        self.linear = operations.Linear(
            dim, config.out_channels * PATCH_TEMPORAL * PATCH_SPATIAL**2, bias=False, **factory
        )
        self.adaln_modulation = modulation(dim, config.adaln_lora_dim, 2, operations, **factory)

    def forward(self, x: Tensor, embedding: Tensor, adaln_base: Tensor) -> Tensor:
        terms = self.adaln_modulation(embedding) + adaln_base[..., : 2 * x.shape[-1]]
        shift, scale = terms[:, :, None, None].chunk(2, dim=-1)
        return self.linear(modulate(x, shift, scale))


class AnimaTransformer(nn.Module):
    """Predicts the rectified-flow velocity (noise minus image) of Wan-normalised latents.

    Args:
        config: Dimensions, see `anima.config.config_from_shapes`.
        operations: Namespace with Linear, RMSNorm and Embedding (whose forward takes `out_dtype`).
        attention: `attention(q, k, v, heads, transformer_options=...)`, q/k/v (B, heads, N, head_dim) -> (B, N, D).
        device, dtype: Of the parameters.
    """

    def __init__(
        self,
        config: AnimaConfig,
        *,
        operations: Any = TorchOperations,
        attention: AttentionFn = sdpa,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.config = config
        self.dtype = dtype
        self.x_embedder = PatchEmbed(config.in_channels + 1, config.model_dim, operations, **factory)
        self.t_embedder = nn.Sequential(
            TimestepFeatures(config.model_dim), TimestepEmbedding(config.model_dim, operations, **factory)
        )
        self.t_embedding_norm = operations.RMSNorm(config.model_dim, eps=NORM_EPS, **factory)
        self.blocks = nn.ModuleList(Block(config, operations, attention, **factory) for _ in range(config.num_blocks))
        self.final_layer = FinalLayer(config, operations, **factory)
        if config.adapter is not None:
            self.llm_adapter = LLMAdapter(config.adapter, operations, **factory)

    def preprocess_text_embeds(
        self, text_embeds: Tensor, text_ids: Tensor | None, t5xxl_weights: Tensor | None = None
    ) -> Tensor:
        """Run the LLM adapter: Qwen3 states and T5 ids -> finished context.

        Args:
            text_embeds: Qwen3 hidden states (B, M, source_dim), in the compute dtype.
            text_ids: T5 token ids (B, N), or None when `text_embeds` is a finished context already.
            t5xxl_weights: Prompt weights (B, N, 1), or None.

        Returns:
            (B, max(N, 512), context_dim). The method has the name under which ComfyUI's own model offers it.
        """
        if text_ids is None:
            return text_embeds
        return finish_context(self.llm_adapter(text_embeds, text_ids), t5xxl_weights)

    def forward(
        self,
        x: Tensor,
        timesteps: Tensor,
        context: Tensor,
        fps: Tensor | None = None,
        padding_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Args:
            x: Noisy latents (B, 16, T, H, W) or (B, 16, H, W); odd sizes are padded to the patch and cropped back.
            timesteps: sigma in (0, 1], (B,) or (B, T).
            context: (B, N, context_dim), from `preprocess_text_embeds`.
            fps: Accepted for the host's call, without effect: Anima has no fps modulation.
            padding_mask: (B, 1, H', W'), 1 where pixels are padding; None means no padding.
            **kwargs: `transformer_options`, of which are honoured `patches` (post_input, attn1_patch, attn2_patch,
                attn1_output_patch, attn2_output_patch, mlp_patch), `patches_replace["dit"]` with
                ("double_block", i) or ("single_block", i), and what `attention` reads. `t5xxl_ids` and
                `t5xxl_weights` run the adapter first, as ComfyUI does while training.

        Returns:
            Velocity of x's shape.
        """
        options: Options = kwargs.get("transformer_options") or {}
        if kwargs.get("t5xxl_ids") is not None:
            context = self.preprocess_text_embeds(context, kwargs["t5xxl_ids"], kwargs.get("t5xxl_weights"))
        is_image = x.ndim == 4
        if is_image:
            x = x.unsqueeze(2)
        frames, height, width = x.shape[-3:]
        x = F.pad(x, (0, width % PATCH_SPATIAL, 0, height % PATCH_SPATIAL, 0, 0), mode="circular")

        tokens = self.x_embedder(torch.cat([x, self._padding_channel(x, padding_mask)], dim=1))
        _, t, h, w, _ = tokens.shape
        rope = self.rope(t, h, w, tokens.device)
        features = self.t_embedder[0](timesteps[:, None] if timesteps.ndim == 1 else timesteps).to(tokens.dtype)
        adaln_base = self.t_embedder[1](features)
        embedding = self.t_embedding_norm(features)

        tokens, options = _apply_post_input(tokens, x, options)
        if tokens.dtype == torch.float16:
            tokens = tokens.float()
        for index, block in enumerate(self.blocks):
            options["block_index"] = index
            tokens = self._run_block(block, index, tokens, embedding, adaln_base, context, rope, options)

        out = self.final_layer(tokens.to(context.dtype), embedding, adaln_base)
        out = rearrange(
            out, "b t h w (p1 p2 r c) -> b c (t r) (h p1) (w p2)", p1=PATCH_SPATIAL, p2=PATCH_SPATIAL, r=PATCH_TEMPORAL
        )[:, :, :frames, :height, :width]
        return out.squeeze(2) if is_image else out

    def rope(self, t: int, h: int, w: int, device: torch.device | None = None) -> Tensor:
        """Rotations for a token grid: (1, t*h*w, 1, head_dim/2, 2, 2)."""
        config = self.config
        ratios = (config.rope_ratio_t, config.rope_ratio_h, config.rope_ratio_w)
        return rope_table(t, h, w, config.head_dim, ratios, device)[None, :, None]

    @staticmethod
    def _padding_channel(x: Tensor, padding_mask: Tensor | None) -> Tensor:
        if padding_mask is None:
            return torch.zeros_like(x[:, :1])
        mask = F.interpolate(padding_mask.to(x), size=x.shape[-2:], mode="nearest")
        return mask.unsqueeze(2).expand(-1, -1, x.shape[2], -1, -1)

    @staticmethod
    def _run_block(
        block: nn.Module, index: int, tokens: Tensor, embedding: Tensor, adaln_base: Tensor, context: Tensor,
        rope: Tensor, options: Options,
    ) -> Tensor:  # fmt: skip
        """Run one block, or what `patches_replace["dit"]` puts in its place (called as ComfyUI's DiTs call it)."""
        replacements = options.get("patches_replace", {}).get("dit", {})
        replace = replacements.get(("double_block", index)) or replacements.get(("single_block", index))
        if replace is None:
            return block(tokens, embedding, adaln_base, context, rope, options)

        def original(args: dict[str, Any]) -> dict[str, Any]:
            out = block(args["img"], args["vec"], adaln_base, args["txt"], args["pe"], args["transformer_options"])
            return {**args, "img": out}

        args = {"img": tokens, "txt": context, "vec": embedding, "pe": rope, "transformer_options": options}
        return replace(args, {"original_block": original})["img"]


def _apply_post_input(tokens: Tensor, x: Tensor, options: Options) -> tuple[Tensor, Options]:
    """Run the `post_input` patches, giving them a fresh `model_patch_data` to share with the block patches."""
    options = options.copy()
    patches = options.get("patches", {}).get("post_input")
    if patches:
        options["model_patch_data"] = {}
    for patch in patches or ():
        tokens = patch({"img": tokens, "x": x, "transformer_options": options})["img"]
    return tokens, options
