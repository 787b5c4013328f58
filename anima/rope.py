"""Rotary position embeddings: 3-D for the DiT, 1-D for the LLM adapter.

Both rotate in split halves (element i with element i + dim/2), never interleaved.
"""

from __future__ import annotations

import torch
from einops import repeat
from torch import Tensor

THETA = 10000.0


def axis_dims(head_dim: int) -> tuple[int, int, int]:
    """Split a head dimension over the axes (t, h, w): h = w = head_dim // 6 * 2, t takes the rest."""
    spatial = head_dim // 6 * 2
    return head_dim - 2 * spatial, spatial, spatial


def axis_frequencies(dim: int, ratio: float, device: torch.device | None = None) -> Tensor:
    """NTK-scaled frequencies of one axis.

    Args:
        dim: Features this axis owns (even).
        ratio: Extrapolation ratio; theta grows by ratio ** (dim / (dim - 2)).

    Returns:
        float32 tensor (dim // 2,).
    """
    theta = THETA * ratio ** (dim / (dim - 2))
    exponents = torch.arange(0, dim, 2, device=device).float() / dim
    return 1.0 / (theta**exponents)


def rope_table(
    frames: int,
    height: int,
    width: int,
    head_dim: int,
    ratios: tuple[float, float, float],
    device: torch.device | None = None,
) -> Tensor:
    """Rotation matrices for a grid of tokens, in the order (t h w).

    Args:
        frames, height, width: Token grid (latent size after patching).
        head_dim: Features per attention head.
        ratios: NTK extrapolation ratios (t, h, w); Anima uses (1, 4, 4).

    Returns:
        float32 tensor (frames*height*width, head_dim // 2, 2, 2) holding [[cos, -sin], [sin, cos]].

    Source: NVIDIA cosmos-predict2, VideoRopePosition3DEmb, without fps modulation.
    """
    dim_t, dim_h, dim_w = axis_dims(head_dim)
    position = torch.arange(max(frames, height, width), dtype=torch.float32, device=device)
    angles_t = torch.outer(position[:frames], axis_frequencies(dim_t, ratios[0], device))
    angles_h = torch.outer(position[:height], axis_frequencies(dim_h, ratios[1], device))
    angles_w = torch.outer(position[:width], axis_frequencies(dim_w, ratios[2], device))
    angles = torch.cat(
        [
            repeat(angles_t, "t d -> (t h w) d", h=height, w=width),
            repeat(angles_h, "h d -> (t h w) d", t=frames, w=width),
            repeat(angles_w, "w d -> (t h w) d", t=frames, h=height),
        ],
        dim=-1,
    )
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([cos, -sin, sin, cos], dim=-1).unflatten(-1, (2, 2))


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Apply `rope_table` rotations in the table's precision.

    Args:
        x: (..., tokens, heads, head_dim).
        table: (..., tokens, 1, head_dim // 2, 2, 2), broadcastable to x.

    Returns:
        Tensor of x's shape and dtype.
    """
    first, second = x.to(table.dtype).chunk(2, dim=-1)
    (cos, minus_sin), (sin, cos_) = table.unbind(-2)[0].unbind(-1), table.unbind(-2)[1].unbind(-1)
    return torch.cat([cos * first + minus_sin * second, sin * first + cos_ * second], dim=-1).type_as(x)


def adapter_rope(length: int, head_dim: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of the adapter's 1-D RoPE (theta 10000), computed in float32.

    Returns:
        Two tensors (1, 1, length, head_dim) of the dtype and device of `like`.
    """
    frequencies = 1.0 / (THETA ** (torch.arange(0, head_dim, 2, device=like.device).float() / head_dim))
    position = torch.arange(length, device=like.device).float()
    angles = (frequencies[:, None] @ position[None, :]).T
    angles = torch.cat([angles, angles], dim=-1)[None, None]
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate_adapter(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate x (B, heads, tokens, head_dim) by `adapter_rope`, in x's own precision."""
    cos, sin = rope
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
