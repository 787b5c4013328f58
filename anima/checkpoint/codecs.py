"""Unpacking quantised weights to float32, value for value as the reference libraries do.

GGUF: blocks of bytes, decoded in torch for the common types, by the `gguf` package for the others. nf4: bitsandbytes'
4-bit codes with absmax per block. Scaled: fp8 or int8 values times a scale.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import MissingPackageError

GGUF_BLOCKS: dict[str, tuple[int, int]] = {
    "F32": (1, 4), "F16": (1, 2), "BF16": (1, 2), "F64": (1, 8), "I8": (1, 1), "I16": (1, 2), "I32": (1, 4), "I64": (1, 8),
    "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34), "Q8_1": (32, 40),
    "Q2_K": (256, 84), "Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210), "Q8_K": (256, 292),
    "IQ2_XXS": (256, 66), "IQ2_XS": (256, 74), "IQ3_XXS": (256, 98), "IQ1_S": (256, 50), "IQ4_NL": (32, 18),
    "IQ3_S": (256, 110), "IQ2_S": (256, 82), "IQ4_XS": (256, 136), "IQ1_M": (256, 56), "TQ1_0": (256, 54),
    "TQ2_0": (256, 66), "MXFP4": (32, 17),
}  # fmt: skip
"""GGUF type -> (values, bytes) of a block."""

GGUF_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
"""Type numbers of the GGUF format."""

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}


def unpack_gguf(kind: str, parts: dict[str, Tensor]) -> Tensor:
    """Decode GGUF blocks.

    Args:
        kind: GGUF type.
        parts: `blocks`, uint8 (n, bytes per block).

    Returns:
        float32 (n, values per block).
    """
    blocks = parts["blocks"]
    decode = _DECODERS.get(kind)
    if decode is not None:
        return decode(blocks)
    try:
        import gguf
    except ImportError as error:
        raise MissingPackageError("gguf", f"Unpacking GGUF weights of type {kind}") from error
    values = gguf.dequantize(blocks.cpu().numpy(), gguf.GGMLQuantizationType[kind])
    return torch.from_numpy(values).to(blocks.device)


def _half(data: Tensor) -> Tensor:
    """Bytes of one or more float16 per row -> float32."""
    return data.contiguous().view(torch.float16).float()


def _nibbles(data: Tensor) -> Tensor:
    """(n, k) bytes -> (n, 2k) values 0..15, all low halves first."""
    return torch.cat([data & 15, data >> 4], dim=-1)


def _fifth_bits(data: Tensor) -> Tensor:
    """(n, 4) bytes -> (n, 32) values 0 or 16."""
    bits = torch.arange(8, device=data.device, dtype=torch.uint8)
    return ((data[..., None] >> bits) & 1).flatten(-2) << 4


def _q8_0(b: Tensor) -> Tensor:
    return _half(b[:, :2]) * b[:, 2:].contiguous().view(torch.int8).float()


def _q4_0(b: Tensor) -> Tensor:
    return _half(b[:, :2]) * (_nibbles(b[:, 2:]).to(torch.int8) - 8).float()


def _q4_1(b: Tensor) -> Tensor:
    return _half(b[:, :2]) * _nibbles(b[:, 4:]).float() + _half(b[:, 2:4])


def _q5_0(b: Tensor) -> Tensor:
    values = _nibbles(b[:, 6:]) | _fifth_bits(b[:, 2:6])
    return _half(b[:, :2]) * (values.to(torch.int8) - 16).float()


def _q5_1(b: Tensor) -> Tensor:
    values = _nibbles(b[:, 8:]) | _fifth_bits(b[:, 4:8])
    return _half(b[:, :2]) * values.float() + _half(b[:, 2:4])


def _k_scales(b: Tensor) -> tuple[Tensor, Tensor]:
    """The 6-bit scales and minima of Q4_K and Q5_K: 12 bytes -> two (n, 8)."""
    low, high, rest = b[:, :4], b[:, 4:8], b[:, 8:12]
    scales = torch.cat([low & 63, (rest & 15) | ((low >> 2) & 48)], dim=-1)
    minima = torch.cat([high & 63, (rest >> 4) | ((high >> 2) & 48)], dim=-1)
    return scales.float(), minima.float()


def _q4_k(b: Tensor) -> Tensor:
    scales, minima = _k_scales(b[:, 4:16])
    values = _nibbles(b[:, 16:].unflatten(1, (4, 32))).reshape(-1, 8, 32).float()
    d, low = (_half(b[:, :2]) * scales)[..., None], (_half(b[:, 2:4]) * minima)[..., None]
    return (d * values - low).flatten(1)


def _q5_k(b: Tensor) -> Tensor:
    scales, minima = _k_scales(b[:, 4:16])
    values = _nibbles(b[:, 48:].unflatten(1, (4, 32))).reshape(-1, 8, 32)
    bits = torch.arange(8, device=b.device, dtype=torch.uint8)[:, None]
    values = (values | (((b[:, None, 16:48] >> bits) & 1) << 4)).float()
    d, low = (_half(b[:, :2]) * scales)[..., None], (_half(b[:, 2:4]) * minima)[..., None]
    return (d * values - low).flatten(1)


def _q6_k(b: Tensor) -> Tensor:
    low = b[:, :128].unflatten(1, (2, 64))
    high = b[:, 128:192].unflatten(1, (2, 1, 32))
    shifts = torch.tensor([0, 2, 4, 6], device=b.device, dtype=torch.uint8)[:, None]
    values = _nibbles(low).reshape(-1, 2, 4, 32) | (((high >> shifts) & 3) << 4)
    scales = b[:, 192:208].contiguous().view(torch.int8).float()
    d = (_half(b[:, 208:210]) * scales)[..., None]
    return (d * (values.to(torch.int8) - 32).float().reshape(-1, 16, 16)).flatten(1)


_DECODERS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
}  # fmt: skip


def unpack_nf4(offset: float, nested_block: int, parts: dict[str, Tensor]) -> Tensor:
    """Decode bitsandbytes' 4-bit codes.

    Args:
        offset: Added to nested absmax values.
        nested_block: Values per nested scale, 0 when absmax is stored plainly.
        parts: `codes` uint8 (two values a byte, the high half first), `absmax`, `table` (16 values) and, when nested,
            `nested_absmax` and `nested_table`.

    Returns:
        float32, flat.
    """
    codes, absmax = parts["codes"].flatten(), parts["absmax"]
    if nested_block:
        scales = parts["nested_absmax"].float().repeat_interleave(nested_block)[: absmax.numel()]
        absmax = parts["nested_table"].float()[absmax.long()] * scales + offset
    values = parts["table"].float()[torch.stack([codes >> 4, codes & 15], dim=-1).flatten().int()]
    block = values.numel() // absmax.numel()
    return (values.unflatten(0, (-1, block)) * absmax.float()[:, None]).flatten()


def unpack_scaled(parts: dict[str, Tensor]) -> Tensor:
    """fp8 or int8 `values` times `scale` (one number, or one a row)."""
    return parts["values"].float() * parts["scale"].float()
