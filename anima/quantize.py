"""Writing quantised DiTs, tensor by tensor: fp8, scaled fp8, int8, nf4 in safetensors, and GGUF.

Only the attention and MLP matrices of the blocks are quantised; embedders, modulation, norms, final layer and adapter
keep their dtype (as float32 or bfloat16 in GGUF), and so does a matrix that cannot be cut into the format's blocks.
"""

from __future__ import annotations

import fnmatch
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .checkpoint.codecs import unpack_gguf, unpack_nf4, unpack_scaled
from .checkpoint.dit import plan_dit
from .checkpoint.writer import Planned, whole_or_absent, write_safetensors
from .convert import planned_tensors
from .errors import InputError, MissingPackageError

FORMATS = ("fp8", "fp8_scaled", "int8", "nf4", "gguf:Q8_0", "gguf:Q5_1", "gguf:Q5_0", "gguf:Q4_1", "gguf:Q4_0")
"""The `gguf` package packs these types; it unpacks the K-quants but cannot make them."""
QUANTISED = re.compile(r"^blocks\.\d+\.(self_attn|cross_attn|mlp)\.\w+\.weight$")
NF4_BLOCK, GGUF_BLOCK = 64, 32
NF4_TABLE = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Quantiles of the normal distribution, Dettmers et al. 2023, arXiv:2305.14314."""


@dataclass
class Packed:
    """A quantised matrix: the tensors to store (suffix to the weight's name -> tensor) and what they unpack to."""

    stored: dict[str, Tensor]
    unpacked: Tensor


@dataclass
class QuantiseReport:
    """Relative error of each quantised matrix (Frobenius norm of the difference over that of the matrix)."""

    errors: dict[str, float] = field(default_factory=dict)
    kept: int = 0

    def text(self) -> str:
        worst = sorted(self.errors.items(), key=lambda item: -item[1])
        lines = [f"{name}: {error:.5f}" for name, error in worst]
        mean = sum(self.errors.values()) / len(self.errors)
        return "\n".join(
            [*lines, f"{len(worst)} matrices quantised, mean relative error {mean:.5f}; {self.kept} tensors kept"]
        )


def quantize_dit(
    source: str | PathLike[str],
    target: Path,
    format: str,
    *,
    keep: Sequence[str] = (),
    force: bool = False,
    on_bytes: Callable[[int], None] | None = None,
) -> QuantiseReport:
    """Write a quantised copy of a DiT, without a prefix.

    Args:
        format: One of FORMATS.
        keep: Patterns (`*` and `?`) of more tensors to leave as they are.
        on_bytes: Progress.

    Raises:
        InputError: unknown format, a source that is quantised already, or a name that does not fit the format.
        AnimaError: the target exists, or writing failed; nothing is left behind.
    """
    is_gguf = format.startswith("gguf:")
    if format not in FORMATS:
        raise InputError("No such format.", found=format, expected=", ".join(FORMATS))
    if (target.suffix.lower() == ".gguf") != is_gguf:
        raise InputError("The file's name does not fit the format.", file=target, found=format,
                         expected="a name ending in .gguf for GGUF, in .safetensors otherwise")  # fmt: skip
    plan = plan_dit(source)
    if plan.quantisation != "none":
        raise InputError(
            "The source is quantised already.", file=source, found=plan.quantisation, expected="plain weights"
        )
    tensors = planned_tensors(plan, None)
    report = QuantiseReport()

    def chosen(name: str) -> bool:
        shape = tensors[name].shape
        rest = shape[-1] % GGUF_BLOCK if is_gguf else math.prod(shape) % NF4_BLOCK
        fits = len(shape) == 2 and rest == 0
        return bool(QUANTISED.match(name)) and fits and not any(fnmatch.fnmatch(name, pattern) for pattern in keep)

    report.kept = sum(not chosen(name) for name in tensors)
    write = _write_gguf if is_gguf else _write_safetensors
    write(target, tensors, format, chosen, report, force, on_bytes)
    return report


def pack(format: str, weight: Tensor) -> Packed:
    """Quantise one matrix (out, in)."""
    kind = format.removeprefix("gguf:")
    return _pack_gguf(kind, weight) if kind != format else _PACKERS[format](weight)


def _pack_fp8(weight: Tensor) -> Packed:
    values = weight.float().clamp(-448, 448).to(torch.float8_e4m3fn)
    return Packed({"": values}, values.float())


def _pack_scaled(values_of: Callable[[Tensor], Tensor], largest: float, format: str, weight: Tensor) -> Packed:
    scale = (weight.float().abs().max() / largest).clamp_min(1e-12)
    values = values_of(weight.float() / scale)
    stored = {"": values, "weight_scale": scale.reshape(()), "comfy_quant": _comfy_quant(format)}
    return Packed(stored, unpack_scaled({"values": values, "scale": scale}))


def _comfy_quant(format: str) -> Tensor:
    return torch.tensor(list(json.dumps({"format": format}).encode()), dtype=torch.uint8)


def _pack_nf4(weight: Tensor) -> Packed:
    table = torch.tensor(NF4_TABLE)
    blocks = weight.float().reshape(-1, NF4_BLOCK)
    absmax = blocks.abs().amax(dim=1)
    middles = (table[1:] + table[:-1]) / 2
    codes = torch.bucketize(blocks / absmax.clamp_min(1e-12)[:, None], middles).to(torch.uint8).flatten()
    packed = (codes[0::2] << 4 | codes[1::2]).unsqueeze(1)
    state = {"quant_type": "nf4", "blocksize": NF4_BLOCK, "dtype": "bfloat16", "shape": list(weight.shape)}
    raw = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    stored = {
        "": packed,
        "weight.absmax": absmax,
        "weight.quant_map": table,
        "weight.quant_state.bitsandbytes__nf4": raw,
    }
    values = unpack_nf4(0.0, 0, {"codes": packed, "absmax": absmax, "table": table})
    return Packed(stored, values.reshape(weight.shape))


def _pack_gguf(kind: str, weight: Tensor) -> Packed:
    gguf = _gguf()
    data = torch.from_numpy(gguf.quantize(weight.float().numpy(), gguf.GGMLQuantizationType[kind]))
    values = unpack_gguf(kind, {"blocks": data.reshape(-1, gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1])})
    return Packed({"": data}, values.reshape(weight.shape))


_PACKERS: dict[str, Callable[[Tensor], Packed]] = {
    "fp8": _pack_fp8,
    "fp8_scaled": partial(_pack_scaled, lambda x: x.to(torch.float8_e4m3fn), 448.0, "float8_e4m3fn"),
    "int8": partial(_pack_scaled, lambda x: x.round().clamp(-127, 127).to(torch.int8), 127.0, "int8_tensorwise"),
    "nf4": _pack_nf4,
}


def _gguf() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise MissingPackageError("gguf", "Writing GGUF files") from error
    return gguf


def _error(report: QuantiseReport, name: str, weight: Tensor, packed: Packed) -> None:
    report.errors[name] = float((weight.float() - packed.unpacked).norm() / weight.float().norm().clamp_min(1e-12))


@lru_cache(maxsize=32)
def _stored_as(format: str, shape: tuple[int, ...]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """dtype and shape of what `pack` stores for a matrix, by suffix; worked out once for the blocks' few shapes."""
    return {suffix: (t.dtype, tuple(t.shape)) for suffix, t in pack(format, torch.zeros(shape)).stored.items()}


def _write_safetensors(
    target: Path, tensors: dict[str, Planned], format: str, chosen: Callable[[str], bool], report: QuantiseReport,
    force: bool, on_bytes: Callable[[int], None] | None,
) -> None:  # fmt: skip
    """Packs each matrix when the first of its tensors is written, and forgets it with the last."""
    packed: dict[str, Packed] = {}
    out: dict[str, Planned] = {}

    def read(name: str, suffix: str, last: bool) -> Tensor:
        if name not in packed:
            weight = tensors[name].read()
            packed[name] = pack(format, weight)
            _error(report, name, weight, packed[name])
        tensor = packed[name].stored[suffix]
        if last:
            del packed[name]
        return tensor

    for name, planned in tensors.items():
        if not chosen(name):
            out[name] = planned
            continue
        stored = _stored_as(format, planned.shape)
        for suffix, (dtype, shape) in stored.items():
            key = name.removesuffix("weight") + suffix if suffix else name
            out[key] = Planned(dtype, shape, partial(read, name, suffix, suffix == list(stored)[-1]))
    write_safetensors(target, out, {"format": "pt"}, force=force, on_bytes=on_bytes)


def _write_gguf(
    target: Path, tensors: dict[str, Planned], format: str, chosen: Callable[[str], bool], report: QuantiseReport,
    force: bool, on_bytes: Callable[[int], None] | None,
) -> None:  # fmt: skip
    gguf = _gguf()
    types = gguf.GGMLQuantizationType
    kind = types[format.removeprefix("gguf:")]
    plain = {torch.float32: types.F32, torch.bfloat16: types.BF16, torch.float16: types.F16}
    with whole_or_absent(target, force) as partial_file:
        writer = gguf.GGUFWriter(partial_file, "cosmos")
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        for name, planned in tensors.items():
            stored = kind if chosen(name) else types.F32 if len(planned.shape) < 2 else plain[planned.dtype]
            shape = gguf.quant_shape_to_byte_shape(planned.shape, stored)
            writer.add_tensor_info(name, shape, np.dtype(np.uint8), math.prod(shape), raw_dtype=stored)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, planned in tensors.items():
            weight = planned.read()
            if chosen(name):
                packed = pack(format, weight)
                _error(report, name, weight, packed)
                data = packed.stored[""]
            else:
                in_place = weight.ndim > 1 and weight.dtype in plain
                data = (weight if in_place else weight.float()).contiguous().view(torch.uint8)
            writer.write_tensor_data(data.numpy())
            if on_bytes is not None:
                on_bytes(data.nbytes)
        writer.close()


def forward_error(source: str | PathLike[str], quantised: str | PathLike[str], dtype: torch.dtype) -> float:
    """Relative error of the whole DiT's velocity on noise at sigma 0.75, against the source."""
    from .pipeline import load_transformer
    from .sampling import seeded_noise

    outputs = []
    for path in (source, quantised):
        model = load_transformer(path, None, dtype)
        x = seeded_noise((1, model.config.in_channels, 32, 32), 0).to(dtype)
        context = seeded_noise((1, 512, model.config.context_dim), 1).to(dtype)
        with torch.inference_mode():
            outputs.append(model(x, torch.tensor([0.75]), context).float())
        del model
    return float((outputs[0] - outputs[1]).norm() / outputs[0].norm())
