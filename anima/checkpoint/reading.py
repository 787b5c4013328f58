"""Reading the tensors behind a source, packed ones as `PackedTensor`."""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ..packed import PackedTensor
from .codecs import GGUF_BLOCKS, PLAIN, unpack_gguf, unpack_nf4, unpack_scaled
from .header import Header
from .sources import NF4_STATE, QUANTISATION_EXTRAS, Source, nf4_state, tensor_files

Load = Callable[[Path, list[str]], dict[str, Tensor]]
SCALED_FORMATS = ("float8_e4m3fn", "float8_e5m2", "int8_tensorwise")
"""ComfyUI's quantised formats that are a value times a scale."""


def load_safetensors(path: Path, names: list[str]) -> dict[str, Tensor]:
    """Memory-mapped tensors of a safetensors file."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in names}


def read_tensors(source: Source, load: Load = load_safetensors) -> dict[str, Tensor]:
    """Tensors of a source under their canonical names.

    Args:
        load: How to read plain safetensors files.

    Returns:
        Dense tensors; GGUF and nf4 weights as `PackedTensor` of logical dtype bfloat16. Extras of ComfyUI's quantised
        formats are among them, see `pack_scaled`.
    """
    header = source.header
    if header.is_gguf:
        with header.path.open("rb") as opened:
            view = memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY))
        return {new: _gguf_tensor(header, view, old) for old, new in source.rename.items()}
    tensors: dict[str, Tensor] = {}
    for file, names in tensor_files(header):
        wanted = [name for name in names if name in source.rename]
        loaded = load(file, wanted)
        tensors |= {source.rename[name]: loaded[name] for name in wanted}
    return _pack_nf4(tensors)


def _gguf_tensor(header: Header, view: memoryview, name: str) -> Tensor:
    info = header.tensors[name]
    raw = torch.frombuffer(view, dtype=torch.uint8, count=info.end - info.begin, offset=header.data_start + info.begin)
    if info.dtype in PLAIN:
        return raw.view(PLAIN[info.dtype]).reshape(info.shape)
    blocks = raw.reshape(-1, GGUF_BLOCKS[info.dtype][1])
    return PackedTensor({"blocks": blocks}, (unpack_gguf, info.dtype), info.shape, torch.bfloat16)


def _pack_nf4(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Put the parts of each bitsandbytes weight together."""
    weights = [name.removesuffix(NF4_STATE) for name in tensors if name.endswith(NF4_STATE)]
    if not weights:
        return tensors
    out = {name: t for name, t in tensors.items() if ".weight." not in name}
    for name in weights:
        state = nf4_state(tensors[name + NF4_STATE].numpy().tobytes())
        parts = {"codes": tensors[name], "absmax": tensors[f"{name}.absmax"], "table": tensors[f"{name}.quant_map"]}
        nested = f"{name}.nested_absmax" in tensors
        if nested:
            parts["nested_absmax"] = tensors[f"{name}.nested_absmax"]
            parts["nested_table"] = tensors[f"{name}.nested_quant_map"]
        offset, block = state.get("nested_offset", 0.0), state.get("nested_blocksize", 256) if nested else 0
        out[name] = PackedTensor(parts, (unpack_nf4, offset, block), tuple(state["shape"]), torch.bfloat16)
    return out


def pack_scaled(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights in ComfyUI's scaled formats -> `PackedTensor`, for use without ComfyUI; extras are consumed."""
    out = {name: t for name, t in tensors.items() if not QUANTISATION_EXTRAS.search(name)}
    for name, tensor in tensors.items():
        for suffix in (".weight_scale", ".scale_weight"):
            if name.endswith(suffix):
                weight = name.removesuffix(suffix) + ".weight"
                parts = {"values": tensors[weight], "scale": tensor}
                out[weight] = PackedTensor(parts, (unpack_scaled,), tuple(tensors[weight].shape), torch.bfloat16)
    return out


def comfy_formats(tensors: dict[str, Tensor]) -> set[str]:
    """Names of the formats that `comfy_quant` tensors speak of."""
    return {json.loads(t.numpy().tobytes())["format"] for name, t in tensors.items() if name.endswith(".comfy_quant")}
