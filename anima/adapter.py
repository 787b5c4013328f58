"""The LLM adapter: T5 token ids ask, Qwen3 hidden states answer, the DiT's context comes out.

Submodule names are those of the checkpoint below `llm_adapter.`.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from .config import MIN_CONTEXT_TOKENS, AdapterConfig
from .rope import adapter_rope, rotate_adapter

NORM_EPS = 1e-6
Rope = tuple[Tensor, Tensor]


class AdapterAttention(nn.Module):
    """Multi-head attention with QK RMSNorm before RoPE, without a mask."""

    def __init__(self, query_dim: int, source_dim: int, head_dim: int, operations: Any, **factory: Any):
        super().__init__()
        self.head_dim = head_dim
        self.q_proj = operations.Linear(query_dim, query_dim, bias=False, **factory)
        self.q_norm = operations.RMSNorm(head_dim, eps=NORM_EPS, **factory)
        self.k_proj = operations.Linear(source_dim, query_dim, bias=False, **factory)
        self.k_norm = operations.RMSNorm(head_dim, eps=NORM_EPS, **factory)
        self.v_proj = operations.Linear(source_dim, query_dim, bias=False, **factory)
        self.o_proj = operations.Linear(query_dim, query_dim, bias=False, **factory)

    def forward(self, x: Tensor, source: Tensor, rope: Rope, source_rope: Rope) -> Tensor:
        """x: (B, N, query_dim), source: (B, M, source_dim) -> (B, N, query_dim)."""

        def heads(t: Tensor) -> Tensor:
            return t.unflatten(-1, (-1, self.head_dim))

        q = rotate_adapter(self.q_norm(heads(self.q_proj(x))).transpose(1, 2), rope)
        k = rotate_adapter(self.k_norm(heads(self.k_proj(source))).transpose(1, 2), source_rope)
        v = heads(self.v_proj(source)).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class AdapterBlock(nn.Module):
    """Pre-norm self-attention, cross-attention and GELU MLP."""

    def __init__(self, config: AdapterConfig, operations: Any, **factory: Any):
        super().__init__()
        dim = config.model_dim
        self.norm_self_attn = operations.RMSNorm(dim, eps=NORM_EPS, **factory)
        self.self_attn = AdapterAttention(dim, dim, config.head_dim, operations, **factory)
        self.norm_cross_attn = operations.RMSNorm(dim, eps=NORM_EPS, **factory)
        self.cross_attn = AdapterAttention(dim, config.source_dim, config.head_dim, operations, **factory)
        self.norm_mlp = operations.RMSNorm(dim, eps=NORM_EPS, **factory)
        self.mlp = nn.Sequential(
            operations.Linear(dim, config.mlp_dim, **factory),
            nn.GELU(),
            operations.Linear(config.mlp_dim, dim, **factory),
        )

    def forward(self, x: Tensor, source: Tensor, rope: Rope, source_rope: Rope) -> Tensor:
        normed = self.norm_self_attn(x)
        x = x + self.self_attn(normed, normed, rope, rope)
        x = x + self.cross_attn(self.norm_cross_attn(x), source, rope, source_rope)
        return x + self.mlp(self.norm_mlp(x))


class LLMAdapter(nn.Module):
    """Turns Qwen3 states and T5 token ids into rows the DiT cross-attends to.

    Args:
        config: Dimensions.
        operations: Namespace with Linear, RMSNorm and Embedding.
        factory: `device` and `dtype` of the parameters.
    """

    def __init__(self, config: AdapterConfig, operations: Any, **factory: Any):
        super().__init__()
        self.head_dim = config.head_dim
        self.embed = operations.Embedding(config.vocab_size, config.target_dim, **factory)
        needs_projection = config.model_dim != config.target_dim
        self.in_proj = (
            operations.Linear(config.target_dim, config.model_dim, **factory) if needs_projection else nn.Identity()
        )
        self.blocks = nn.ModuleList(AdapterBlock(config, operations, **factory) for _ in range(config.num_blocks))
        self.out_proj = operations.Linear(config.model_dim, config.target_dim, **factory)
        self.norm = operations.RMSNorm(config.target_dim, eps=NORM_EPS, **factory)

    def forward(self, states: Tensor, ids: Tensor) -> Tensor:
        """Args:
            states: Qwen3 hidden states (B, M, source_dim); their dtype is the compute dtype.
            ids: T5 token ids (B, N), integer.

        Returns:
            (B, N, target_dim), one row for each T5 token.
        """
        x = self.in_proj(self.embed(ids, out_dtype=states.dtype))
        rope = adapter_rope(x.shape[1], self.head_dim, x)
        source_rope = adapter_rope(states.shape[1], self.head_dim, x)
        for block in self.blocks:
            x = block(x, states, rope, source_rope)
        return self.norm(self.out_proj(x))


def finish_context(rows: Tensor, weights: Tensor | None = None) -> Tensor:
    """Scale the adapter's rows by their prompt weights and right-pad with zeros to 512 rows.

    Args:
        rows: (B, N, C) from `LLMAdapter`.
        weights: (B, N, 1) or broadcastable, or None.

    Returns:
        (B, max(N, 512), C). Longer prompts are never truncated.
    """
    if weights is not None:
        rows = rows * weights
    return F.pad(rows, (0, 0, 0, max(0, MIN_CONTEXT_TOKENS - rows.shape[1])))
