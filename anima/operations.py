"""The default `operations` namespace: plain torch layers.

A host (ComfyUI, the GGUF and nf4 loaders) passes its own namespace with the same names instead.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class TorchOperations:
    """Linear, RMSNorm and Embedding from torch; Embedding can name its output dtype."""

    Linear = nn.Linear
    RMSNorm = nn.RMSNorm

    class Embedding(nn.Embedding):
        def forward(self, input: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
            out = super().forward(input)
            return out if out_dtype is None else out.to(out_dtype)


def sdpa(
    q: Tensor, k: Tensor, v: Tensor, heads: int, mask: Tensor | None = None, transformer_options: Any = None
) -> Tensor:
    """Scaled dot-product attention, the default `attention`.

    Args:
        q, k, v: (B, heads, N, head_dim), (B, heads, M, head_dim) twice.
        heads: Number of heads, for hosts that flatten them.
        mask: Additive or boolean mask broadcastable to (B, heads, N, M), or None.
        transformer_options: Ignored here; hosts read overrides from it.

    Returns:
        (B, N, heads * head_dim).
    """
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return cast(Tensor, out.transpose(1, 2).flatten(2))
