"""A batch as WebDataset shards: tar files of `ID.png`, `ID.txt` (the prompt) and `ID.json` (the manifest's row)."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path

from ..checkpoint.writer import whole_or_absent
from ..errors import InputError
from .run import rows_of

FOLDER = "shards"


def pack_shards(folder: Path, size: int) -> Iterator[Path]:
    """Pack a batch's pictures in the manifest's order, `size` to a shard; full shards that are there stay as they are.

    The manifest only grows, so a full shard never changes and a later run rewrites at most the last one.

    Returns:
        The shards' paths, `shards/00000.tar` and so on.
    """
    rows = rows_of(folder)
    if size < 1:
        raise InputError("A shard holds at least one picture.", found=str(size))
    for number, start in enumerate(range(0, len(rows), size)):
        path = folder / FOLDER / f"{number:05}.tar"
        members = {
            name: content
            for row in rows[start : start + size]
            for name, content in {
                row["file"]: folder / row["file"],
                f"{row['id']}.txt": row["job"]["prompt"].encode(),
                f"{row['id']}.json": json.dumps(row, ensure_ascii=False).encode(),
            }.items()
        }
        if not path.exists() or _names(path) != list(members):
            with whole_or_absent(path, force=True) as partial, tarfile.open(partial, "w") as tar:
                for name, content in members.items():
                    _add(tar, name, content if isinstance(content, bytes) else content.read_bytes())
        yield path


def _names(path: Path) -> list[str]:
    with tarfile.open(path) as tar:
        return tar.getnames()


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    tar.addfile(entry, io.BytesIO(content))
