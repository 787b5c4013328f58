"""Parts of transformers' Qwen3 with ComfyUI's rounding: the same functions, summed in the same order."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class FusedQwen3Attention(nn.Module):
    """A Qwen3Attention's layers under a forward that rotates with fused multiply-adds and masks additively."""

    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    o_proj: nn.Module
    q_norm: nn.Module
    k_norm: nn.Module

    def __init__(self, attention: Any):
        super().__init__()
        self.head_dim: int = attention.head_dim
        for name, layer in attention.named_children():
            setattr(self, name, layer)

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], *args: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """hidden_states: (B, N, D), position_embeddings: cos and sin, (B, N, head_dim) -> (B, N, D)."""
        cos, sin = (part.unsqueeze(1) for part in position_embeddings)

        def heads(x: Tensor) -> Tensor:
            return x.unflatten(-1, (-1, self.head_dim))

        q = rotate(self.q_norm(heads(self.q_proj(hidden_states))).transpose(1, 2), cos, sin)
        k = rotate(self.k_norm(heads(self.k_proj(hidden_states))).transpose(1, 2), cos, sin)
        v = heads(self.v_proj(hidden_states)).transpose(1, 2)
        length = q.shape[2]
        mask = torch.full((1, 1, length, length), torch.finfo(q.dtype).min / 4, dtype=q.dtype, device=q.device).triu(1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
        return self.o_proj(out.transpose(1, 2).flatten(2)), None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x (B, heads, N, head_dim) in split halves."""
    half = x.shape[-1] // 2
    sin = sin[..., :half]
    out = x * cos
    first = torch.addcmul(out[..., :half], x[..., half:], -sin)
    second = torch.addcmul(out[..., half:], x[..., :half], sin)
    return torch.cat([first, second], dim=-1)


def round_as_comfyui(module: nn.Module) -> None:
    """Replace a Qwen3Model's norms by torch's fused RMSNorm and its attentions by `FusedQwen3Attention`, in place."""
    child: Any
    for name, child in module.named_children():
        kind = type(child).__name__
        if kind == "Qwen3RMSNorm":
            setattr(module, name, nn.RMSNorm(child.weight.shape[0], eps=child.variance_epsilon))
        elif kind == "Qwen3Attention":
            round_as_comfyui(child)
            setattr(module, name, FusedQwen3Attention(child))
        else:
            round_as_comfyui(child)
