"""The header of a safetensors file, read with bounds and without touching a tensor.

The format: an unsigned 64-bit little-endian length, that many bytes of JSON mapping each name to
`{"dtype", "shape", "data_offsets": [begin, end]}` (plus `__metadata__`, string to string), then the data.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, WrongKindError

MAX_HEADER_BYTES = 32_000_000
"""A released file has 0.1 MB; reading more would only cost memory and time."""
MAX_TENSORS = 100_000
MAX_DIMENSIONS = 16

DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip

REDOWNLOAD = "Download the file again and compare its size and checksum with the page it came from."


@dataclass(frozen=True)
class TensorInfo:
    """One tensor's entry: safetensors dtype name, shape, and byte range relative to `Header.data_start`."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True)
class Header:
    """A checked header. Offsets lie inside the file, do not overlap, and match dtype and shape."""

    path: Path
    tensors: dict[str, TensorInfo]
    metadata: dict[str, str] = field(default_factory=dict)
    data_start: int = 0
    file_size: int = 0

    @property
    def is_gguf(self) -> bool:
        return self.path.suffix.lower() == ".gguf"

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: info.shape for name, info in self.tensors.items()}


def read_header(path: str | PathLike[str]) -> Header:
    """Read and check a safetensors header.

    Args:
        path: The file.

    Raises:
        CheckpointError: missing, empty, truncated or malformed file; the message says which.
        WrongKindError: the file is a pickle, a zip, a GGUF or text, recognised by its first bytes.
    """
    path = Path(path)
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            _reject_other_formats(path, start, size)
            (length,) = struct.unpack("<Q", start)
            if length > MAX_HEADER_BYTES or length < 2:
                raise CheckpointError(
                    "The file is not a safetensors file, or its beginning is damaged.",
                    file=path,
                    found=f"a header length of {length} bytes",
                    expected=f"2 to {MAX_HEADER_BYTES} bytes",
                    fix=REDOWNLOAD,
                )
            if 8 + length > size:
                raise CheckpointError(
                    "The safetensors file is cut off inside its header.",
                    file=path,
                    found=f"{size} bytes in all",
                    expected=f"at least {8 + length} bytes for the header alone",
                    fix=REDOWNLOAD,
                )
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(
            "The model file cannot be read.", file=path, found=str(error), fix="Check the path and the permissions."
        ) from error
    entries = _parse_json(path, raw)
    metadata = _check_metadata(path, entries.pop("__metadata__", {}))
    if len(entries) > MAX_TENSORS:
        raise _damaged(path, f"{len(entries)} tensors", f"at most {MAX_TENSORS}")
    tensors = {name: _check_entry(path, name, entry) for name, entry in entries.items()}
    _check_ranges(path, tensors, size - 8 - length)
    return Header(path, tensors, metadata, 8 + length, size)


def _damaged(path: Path, found: str, expected: str) -> CheckpointError:
    return CheckpointError(
        "The safetensors header is damaged.", file=path, found=found, expected=expected, fix=REDOWNLOAD
    )


def _reject_other_formats(path: Path, start: bytes, size: int) -> None:
    if len(start) < 8:
        raise CheckpointError(
            "The file is empty." if not start else "The file is too short to be a model.",
            file=path, found=f"{size} bytes", expected="a safetensors file", fix=REDOWNLOAD,
        )  # fmt: skip
    (length,) = struct.unpack("<Q", start)
    if length <= min(MAX_HEADER_BYTES, size - 8):
        return  # a header of 640 bytes begins like a pickle
    known = {
        b"PK\x03\x04": "a zip archive or a PyTorch pickle (.pt, .ckpt)",
        b"GGUF": "a GGUF file whose name does not end in .gguf",
        b"\x80\x02": "a Python pickle", b"\x80\x03": "a Python pickle", b"\x80\x04": "a Python pickle",
        b"<!DO": "a web page, probably an error page saved instead of the download",
        b"<htm": "a web page, probably an error page saved instead of the download",
        b"vers": "a Git LFS pointer instead of the file itself",
        b"\x89PNG": "a PNG picture",
    }  # fmt: skip
    for magic, name in known.items():
        if start.startswith(magic):
            raise WrongKindError(
                "The file is not a safetensors file.",
                file=path, found=name, expected="a safetensors file",
                fix="Pickles are refused because they can run code; get the .safetensors version of this model.",
            )  # fmt: skip


def _parse_json(path: Path, raw: bytes) -> dict[str, Any]:
    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(pairs)
        if len(out) != len(pairs):
            raise ValueError("a name appears twice")
        return out

    if not raw.lstrip().startswith(b"{"):
        raise CheckpointError(
            "The file is not a safetensors file.",
            file=path, found="no JSON header at its start", expected="a safetensors file", fix=REDOWNLOAD,
        )  # fmt: skip
    try:
        entries = json.loads(raw, object_pairs_hook=no_duplicates)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"unreadable JSON ({error})", "a JSON object") from error
    return entries


def _check_metadata(path: Path, metadata: Any) -> dict[str, str]:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _damaged(path, "__metadata__ of the wrong type", "a mapping of strings to strings")
    return metadata


def _check_entry(path: Path, name: str, entry: Any) -> TensorInfo:
    def is_count(value: Any) -> bool:
        return type(value) is int and 0 <= value < 2**63

    if not isinstance(entry, dict):
        raise _damaged(path, f"entry of '{name}' is no object", "dtype, shape and data_offsets")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise _damaged(path, f"dtype {str(dtype)[:40]!r} of '{name}'", f"one of {', '.join(DTYPE_BITS)}")
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS or not all(map(is_count, shape)):
        raise _damaged(path, f"shape {str(shape)[:60]} of '{name}'", "a list of non-negative integers")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(is_count, offsets)):
        raise _damaged(path, f"data_offsets {str(offsets)[:60]} of '{name}'", "two non-negative integers")
    info = TensorInfo(dtype, tuple(shape), *offsets)
    if info.begin > info.end or (info.end - info.begin) * 8 != info.numel * DTYPE_BITS[dtype]:
        raise _damaged(path, f"'{name}' occupies {info.end - info.begin} bytes", f"the size of {dtype} {list(shape)}")
    return info


def _check_ranges(path: Path, tensors: dict[str, TensorInfo], available: int) -> None:
    position = 0
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if info.begin != position:
            what = "overlaps another tensor" if info.begin < position else "leaves a gap before it"
            raise _damaged(path, f"the data of '{name}' {what}", "tensors laid end to end")
        position = info.end
    if position > available:
        raise CheckpointError(
            "The safetensors file is cut off: it is shorter than its header says.",
            file=path,
            found=f"{available} bytes of tensor data",
            expected=f"{position} bytes",
            fix=REDOWNLOAD,
        )
    if position < available:
        raise _damaged(path, f"{available - position} bytes after the last tensor", "nothing after it")
