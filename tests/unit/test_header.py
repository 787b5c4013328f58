"""The safetensors header: bounds, and a clear refusal of everything malformed."""

from __future__ import annotations

import contextlib
import json
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from anima.checkpoint.header import read_header
from anima.errors import AnimaError, CheckpointError, WrongKindError


def write(path: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


def entry(dtype: object = "F32", shape: object = (2,), begin: object = 0, end: object = 8) -> dict[str, object]:
    return {"dtype": dtype, "shape": list(shape) if isinstance(shape, tuple) else shape, "data_offsets": [begin, end]}


def test_reads_what_safetensors_writes(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(2, 3), "b": torch.zeros(5, dtype=torch.bfloat16), "empty": torch.zeros(0, 4)}
    save_file(tensors, tmp_path / "x.safetensors", {"note": "hello"})
    header = read_header(tmp_path / "x.safetensors")
    assert header.shapes == {"a": (2, 3), "b": (5,), "empty": (0, 4)}
    assert header.metadata == {"note": "hello"}
    assert header.tensors["b"].dtype == "BF16" and header.tensors["a"].numel == 6


BAD = {
    "duplicate key": b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
    "overlap": {"a": entry(), "b": entry(begin=4, end=12)},
    "gap": {"a": entry(), "b": entry(begin=12, end=20)},
    "size mismatch": {"a": entry(shape=(3,))},
    "negative size": {"a": entry(shape=[-2])},
    "negative offset": {"a": entry(begin=-8, end=0)},
    "overflowing shape": {"a": entry(shape=[2**62, 2**62, 4])},
    "huge number": {"a": entry(shape=[2**70])},
    "float shape": {"a": entry(shape=[2.0])},
    "boolean shape": {"a": entry(shape=[True, 2])},
    "unknown dtype": {"a": entry(dtype="F31")},
    "dtype of wrong type": {"a": entry(dtype=["F32"])},
    "offsets of wrong length": {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0]}},
    "entry is a list": {"a": []},
    "metadata is a list": {"__metadata__": []},
    "metadata holds numbers": {"__metadata__": {"a": 1}},
    "top level is a list": [],
    "no JSON": b"{nonsense",
    "deep nesting": b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "data after the end": {"a": entry(shape=(1,), end=4)},
}


@pytest.mark.parametrize("name", BAD)
def test_malformed_headers_are_refused(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "bad.safetensors", BAD[name], b"\0" * 8)
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert "bad.safetensors" in str(caught.value) and "What to do" in str(caught.value)


def test_lengths_are_bounded_before_anything_is_read(tmp_path: Path) -> None:
    for length in (2**63, 10**9, 0, 1):
        with pytest.raises(CheckpointError):
            read_header(write(tmp_path / "x.safetensors", {}, length=length))


@pytest.mark.parametrize(
    "content,said",
    [
        (b"", "empty"), (b"abc", "too short"), (b"PK\x03\x04" + b"0" * 40, "zip"), (b"GGUF" + b"0" * 40, "GGUF"),
        (b"\x80\x02}q\x00" + b"0" * 40, "pickle"), (b"<!DOCTYPE html><html></html>", "web page"),
        (b"version https://git-lfs.github.com/spec/v1\n", "LFS"), (b"\x89PNG\r\n\x1a\n" + b"0" * 40, "PNG"),
    ],
)  # fmt: skip
def test_other_formats_are_named(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises((CheckpointError, WrongKindError), match=said):
        read_header(path)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing.safetensors", tmp_path):
        with pytest.raises(CheckpointError, match="cannot be read"):
            read_header(path)


def test_truncation_is_noticed_at_every_length(tmp_path: Path) -> None:
    save_file({"a": torch.arange(6.0)}, tmp_path / "x.safetensors")
    whole = (tmp_path / "x.safetensors").read_bytes()
    for length in range(len(whole)):
        (tmp_path / "cut.safetensors").write_bytes(whole[:length])
        with pytest.raises(AnimaError):
            read_header(tmp_path / "cut.safetensors")


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300), st.integers(0, 400))
def test_random_bytes_never_escape_the_error_family(
    tmp_path_factory: pytest.TempPathFactory, raw: bytes, length: int
) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "x.safetensors"
    path.write_bytes(struct.pack("<Q", length) + raw)
    with contextlib.suppress(AnimaError):
        read_header(path)


@pytest.mark.parametrize("length", [0x0280, 0x0380, 0x0480])
def test_a_header_whose_length_begins_like_a_pickle_is_read(tmp_path: Path, length: int) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "f.safetensors", {"k": "v" * (length - 200)})
    raw = (tmp_path / "f.safetensors").read_bytes()
    (have,) = struct.unpack("<Q", raw[:8])
    path = tmp_path / "g.safetensors"
    path.write_bytes(struct.pack("<Q", length) + raw[8 : 8 + have] + b" " * (length - have) + raw[8 + have :])
    assert read_header(path).tensors["a"].shape == (1,)
