"""One header for what may be one file, a sharded index, or a folder in diffusers layout."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from .gguf_header import MAGIC, read_gguf_header
from .header import MAX_HEADER_BYTES, REDOWNLOAD, Header, TensorInfo, read_header

INDEX_SUFFIX = ".safetensors.index.json"
NF4_STATE = ".quant_state.bitsandbytes__nf4"
NF4_STATE_BYTES = 10_000


QUANTISATION_EXTRAS = re.compile(
    r"(\.(comfy_quant|weight_scale(_2)?|scale_weight|scale_input|input_scale"
    r"|weight\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\..+))|(^|\.)scaled_fp8)$"
)
"""Tensors that ride along with quantised weights and belong to no parameter of their own."""


@dataclass(frozen=True)
class Source:
    """Tensors to read from one header's files: file name -> canonical name."""

    header: Header
    rename: dict[str, str]


class ShardedHeader(Header):
    """The headers of several shards as one; `shard_of` tells which file holds a tensor."""

    shard_of: dict[str, Path]


def open_source(path: str | PathLike[str], subfolder: str = "") -> Header:
    """Read the header of a file, of the shards of an index, or of a folder that has either.

    Args:
        path: A `.safetensors` file, a `.safetensors.index.json`, or a folder.
        subfolder: Where a diffusers folder keeps this part, e.g. `transformer`.
    """
    path = Path(path)
    if path.is_dir():
        path = _find_in_folder(path, subfolder)
    if path.name.endswith(INDEX_SUFFIX):
        return _read_index(path)
    return _with_logical_shapes(_read_one(path))


def _read_one(path: Path) -> Header:
    if path.suffix.lower() != ".gguf":
        return read_header(path)
    try:
        with path.open("rb") as file:
            is_gguf = file.read(4) == MAGIC
        return read_gguf_header(path) if is_gguf else read_header(path)
    except OSError as error:
        raise CheckpointError("The model file cannot be read.", file=path, found=str(error)) from error


def nf4_state(raw: bytes) -> dict[str, Any]:
    """The JSON that bitsandbytes keeps beside a 4-bit weight.

    Raises:
        ValueError: not such JSON.
    """
    state = json.loads(raw)
    sides = state.get("shape") if isinstance(state, dict) else None
    if not isinstance(sides, list) or not all(isinstance(side, int) and 0 < side < 2**31 for side in sides):
        raise ValueError("no shape in the quantisation state")
    return state


def _with_logical_shapes(header: Header) -> Header:
    """Give bitsandbytes weights the shape they have unpacked, which only their quantisation state tells."""
    states = [name for name in header.tensors if name.endswith(NF4_STATE)]
    if not states:
        return header
    tensors = dict(header.tensors)
    with header.path.open("rb") as file:
        for name in states:
            info, weight = header.tensors[name], name.removesuffix(NF4_STATE)
            try:
                file.seek(header.data_start + info.begin)
                shape = tuple(nf4_state(file.read(min(info.end - info.begin, NF4_STATE_BYTES)))["shape"])
                packed = tensors[weight]
                if packed.numel * 2 != TensorInfo("NF4", shape, 0, 0).numel:
                    raise ValueError(f"{packed.numel} bytes for shape {list(shape)}")
            except (ValueError, KeyError, RecursionError) as error:
                raise CheckpointError(
                    "The quantisation state of a 4-bit weight is damaged.",
                    file=header.path, found=f"{name}: {error}", expected="bitsandbytes' JSON", fix=REDOWNLOAD,
                ) from error  # fmt: skip
            tensors[weight] = TensorInfo("NF4", shape, packed.begin, packed.end)
    return replace(header, tensors=tensors)


def tensor_files(header: Header) -> Iterator[tuple[Path, list[str]]]:
    """The files behind a header, each with the names of its tensors."""
    if not isinstance(header, ShardedHeader):
        yield header.path, list(header.tensors)
        return
    by_file: dict[Path, list[str]] = {}
    for name, file in header.shard_of.items():
        by_file.setdefault(file, []).append(name)
    yield from by_file.items()


def _find_in_folder(folder: Path, subfolder: str) -> Path:
    place = folder / subfolder if (folder / subfolder).is_dir() else folder
    candidates = sorted(place.glob("*" + INDEX_SUFFIX)) or sorted(place.glob("*.safetensors"))
    if len(candidates) != 1:
        raise CheckpointError(
            f"The folder does not hold exactly one {subfolder or 'model'}.",
            file=place,
            found=", ".join(file.name for file in candidates) or "no safetensors file",
            expected=f"one .safetensors file or one {INDEX_SUFFIX}",
            fix="Name the file itself.",
        )
    return candidates[0]


def _read_index(path: Path) -> Header:
    try:
        if path.stat().st_size > MAX_HEADER_BYTES:
            raise ValueError("too large")
        weight_map = json.loads(path.read_bytes())["weight_map"]
        shards = {name: path.parent / file for name, file in weight_map.items()}
        if any(not isinstance(f, str) or "/" in f or "\\" in f or f.startswith(".") for f in weight_map.values()):
            raise ValueError("a shard outside the folder")
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointError(
            "The index of the sharded model cannot be read.",
            file=path, found=str(error)[:200], expected="a JSON object with a weight_map", fix=REDOWNLOAD,
        ) from error  # fmt: skip
    headers = {file: read_header(file) for file in sorted(set(shards.values()))}
    tensors: dict[str, TensorInfo] = {}
    for name, file in shards.items():
        if name not in headers[file].tensors:
            raise CheckpointError(
                "A shard lacks a tensor that the index names.", file=file, found=f"no '{name}'", fix=REDOWNLOAD
            )
        tensors[name] = headers[file].tensors[name]
    merged = ShardedHeader(path, tensors, {}, 0, sum(header.file_size for header in headers.values()))
    object.__setattr__(merged, "shard_of", shards)
    return merged
