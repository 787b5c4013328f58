"""Writing safetensors one tensor at a time, so that memory holds one tensor and the target is whole or absent."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor

from ..errors import AnimaError

DTYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int64: "I64", torch.int32: "I32",
    torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


@dataclass(frozen=True)
class Planned:
    """A tensor to come: its dtype and shape are known before it is read."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def write_safetensors(
    path: str | PathLike[str],
    tensors: Mapping[str, Planned],
    metadata: Mapping[str, str] | None = None,
    *,
    force: bool = False,
    on_bytes: Callable[[int], None] | None = None,
) -> None:
    """Write a file through a temporary neighbour that is renamed when complete and on disk.

    Args:
        path: Target.
        tensors: Name -> what will be read when its turn comes.
        metadata: Strings for the header.
        force: Allow replacing an existing file.
        on_bytes: Called with the bytes just written.

    Raises:
        AnimaError: the target exists (without force), or writing failed (disk full, say); nothing is left behind.
    """
    with whole_or_absent(Path(path), force) as partial, partial.open("wb") as file:
        file.write(_header(tensors, metadata or {}))
        for name, planned in tensors.items():
            tensor = planned.read().to(planned.dtype).contiguous()
            if tuple(tensor.shape) != planned.shape:
                raise ValueError(f"'{name}' changed its shape while it was read")
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
            if on_bytes is not None:
                on_bytes(planned.nbytes)


@contextmanager
def whole_or_absent(path: Path, force: bool) -> Iterator[Path]:
    """A temporary neighbour to write, which becomes `path` when the context ends well and its bytes are on disk.

    Raises:
        AnimaError: the target exists (without force), or writing failed; nothing is left behind.
    """
    if path.exists() and not force:
        raise AnimaError("The target exists.", file=path, fix="Choose another name, or pass --force to replace it.")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        raise AnimaError(
            "The file could not be written.", file=path, found=str(error), fix="Free some space and try again."
        ) from error
    finally:
        partial.unlink(missing_ok=True)


def _header(tensors: Mapping[str, Planned], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for name, planned in tensors.items():
        entries[name] = {
            "dtype": DTYPE_NAMES[planned.dtype],
            "shape": list(planned.shape),
            "data_offsets": [position, position + planned.nbytes],
        }
        position += planned.nbytes
    raw = json.dumps(entries, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw
