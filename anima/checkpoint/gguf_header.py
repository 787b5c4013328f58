"""The header of a GGUF file, read with bounds and without touching a tensor.

The format (little-endian): magic, version, number of tensors, number of key-values; typed key-values; for each tensor
its name, dimensions (innermost first), type number and offset; padding; the data.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import CheckpointError
from .codecs import GGUF_BLOCKS, GGUF_TYPES
from .header import MAX_DIMENSIONS, MAX_HEADER_BYTES, MAX_TENSORS, REDOWNLOAD, Header, TensorInfo

MAGIC = b"GGUF"
MAX_KEY_VALUES = 10_000
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


def read_gguf_header(path: Path) -> Header:
    """Read and check a GGUF header.

    Raises:
        CheckpointError: truncated or malformed file.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        reader = _Reader(path, file, size)
        reader.take(4)
        version, tensors, key_values = reader.unpack("<IQQ")
        if version not in (2, 3) or tensors > MAX_TENSORS or key_values > MAX_KEY_VALUES:
            raise reader.damaged(f"version {version}, {tensors} tensors, {key_values} key-values")
        metadata = {reader.string(): reader.value() for _ in range(key_values)}
        entries = [reader.tensor() for _ in range(tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= 65536:
            raise reader.damaged(f"alignment {alignment}")
        start = -(-file.tell() // alignment) * alignment
    infos: dict[str, TensorInfo] = {}
    position = 0
    for name, kind, shape, offset in sorted(entries, key=lambda entry: entry[3]):
        values, block_bytes = GGUF_BLOCKS[kind]
        count = 1
        for side in shape:
            count *= side
        length = count // values * block_bytes
        if name in infos or shape[-1] % values or offset < position or start + offset + length > size:
            raise reader.damaged(f"tensor {name!r}: type {kind}, shape {list(shape)}, offset {offset}")
        infos[name] = TensorInfo(kind, shape, offset, offset + length)
        position = offset + length
    strings = {key: str(value) for key, value in metadata.items() if isinstance(value, (str, int, float, bool))}
    return Header(path, infos, strings, start, size)


class _Reader:
    """Sequential reads that never go beyond the bounds of a header."""

    def __init__(self, path: Path, file: BinaryIO, size: int):
        self.path, self.file, self.left = path, file, min(size, MAX_HEADER_BYTES)

    def damaged(self, found: str) -> CheckpointError:
        return CheckpointError(
            "The GGUF header is damaged.",
            file=self.path,
            found=found[:300],
            expected="GGUF version 2 or 3",
            fix=REDOWNLOAD,
        )

    def take(self, count: int) -> bytes:
        self.left -= count
        data = self.file.read(count) if self.left >= 0 else b""
        if len(data) < count:
            raise self.damaged("the file ends inside its header")
        return data

    def unpack(self, layout: str) -> tuple[Any, ...]:
        return struct.unpack(layout, self.take(struct.calcsize(layout)))

    def string(self) -> str:
        (length,) = self.unpack("<Q")
        if length > self.left:
            raise self.damaged(f"a string of {length} bytes")
        return self.take(length).decode("utf-8", "replace")

    def value(self) -> Any:
        (kind,) = self.unpack("<I")
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self._scalar(kind)
        inner, count = self.unpack("<IQ")
        if count > self.left:
            raise self.damaged(f"an array of {count} values")
        if inner == _STRING:
            return [self.string() for _ in range(count)]
        return [self._scalar(inner) for _ in range(count)]

    def _scalar(self, kind: int) -> Any:
        if kind not in _SCALARS:
            raise self.damaged(f"a value of type {kind}")
        return self.unpack("<" + _SCALARS[kind])[0]

    def tensor(self) -> tuple[str, str, tuple[int, ...], int]:
        name = self.string()
        (dimensions,) = self.unpack("<I")
        if not 0 < dimensions <= MAX_DIMENSIONS:
            raise self.damaged(f"tensor {name!r} with {dimensions} dimensions")
        shape = self.unpack(f"<{dimensions}Q")[::-1]
        kind, offset = self.unpack("<IQ")
        if kind not in GGUF_TYPES or max(shape) > 2**40:
            raise self.damaged(f"tensor {name!r}: type {kind}, shape {list(shape)}")
        return name, GGUF_TYPES[kind], shape, offset
