"""Driving a batch: what is missing is made, each picture is written down once, failures do not stop the rest."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import InputError, MissingPackageError
from .jobs import JobList, batch_key, in_batches, job_id
from .worker import Models, RayWorker, Worker

MANIFEST, FAILURES = "manifest.jsonl", "failures.jsonl"
Row = dict[str, Any]
_LOCAL: dict[str, Any] = {"include_dashboard": False}


@dataclass
class Summary:
    """How a run ended."""

    made: int = 0
    there_already: int = 0
    failures: list[Row] = field(default_factory=list)


class Manifest:
    """One JSON line for each picture that is complete on disk.

    A picture is renamed into place before its line is written and synced, so after any death the line says the truth, and
    a picture without a line is made again, with the same bits.
    """

    def __init__(self, folder: Path):
        self.path = folder / MANIFEST
        folder.mkdir(parents=True, exist_ok=True)
        self.done = {row["id"] for row in self._whole_rows()}

    def _whole_rows(self) -> Iterator[Row]:
        """Rows of an earlier run; a line cut by its death is taken away."""
        if not self.path.exists():
            return
        raw = self.path.read_bytes()
        whole = raw[: raw.rfind(b"\n") + 1]
        if len(whole) < len(raw):
            with self.path.open("r+b") as file:
                file.truncate(len(whole))
        for line in whole.splitlines():
            yield json.loads(line)

    def add(self, row: Row) -> bool:
        """Write a row down, unless its picture has one; whether it was written."""
        if row["id"] in self.done:
            return False
        append(self.path, row)
        self.done.add(row["id"])
        return True


def rows_of(folder: Path) -> list[Row]:
    """The manifest of a batch's folder."""
    path = folder / MANIFEST
    if not path.is_file():
        raise InputError(
            "There is no batch in this folder.", file=folder, expected=f"a {MANIFEST}", fix="Run anima batch first."
        )
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def append(path: Path, row: Row) -> None:
    """Add a JSON line and wait until it is on disk."""
    with path.open("ab") as file:
        file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def run_batch(
    jobs: JobList, models: Models, out: Path, *, ray_address: str | None = None, workers: int = 1, batch_size: int = 1,
    on_row: Callable[[Row], None] | None = None,
) -> Summary:  # fmt: skip
    """Make what is missing.

    Args:
        out: Folder of the pictures, the manifest and the list of failures.
        ray_address: Address of a Ray cluster, or `auto`, or `local` for one on this machine; None runs here.
        workers: Actors on the cluster, each with its own copy of the model.
        batch_size: Pictures made together, of jobs that differ in prompt, negative and seed only. Above 1 the pictures
            may differ in rounding from those made one by one.
        on_row: Called with each row of the manifest or of the failures as it comes.
    """
    manifest = Manifest(out)
    (out / FAILURES).unlink(missing_ok=True)
    summary = Summary()
    summary.there_already = len(manifest.done)
    missing = [index for index, job in enumerate(jobs) if job_id(job) not in manifest.done]
    missing.sort(key=lambda index: batch_key(jobs[index]))
    rows = (
        _here(jobs, missing, models, out, batch_size)
        if ray_address is None
        else _on_ray(jobs, missing, models, out, batch_size, ray_address, workers)
    )
    for row in rows:
        if "error" in row:
            append(out / FAILURES, row)
            summary.failures.append(row)
        else:
            summary.made += manifest.add(row)
        if on_row is not None:
            on_row(row)
    return summary


def _here(jobs: JobList, missing: list[int], models: Models, out: Path, batch_size: int) -> Iterator[Row]:
    worker = Worker(models, out)
    for batch in in_batches((jobs[index] for index in missing), batch_size):
        yield from worker.attempt(batch)


def _on_ray(
    jobs: JobList, missing: list[int], models: Models, out: Path, batch_size: int, address: str, workers: int
) -> Iterator[Row]:
    try:
        import ray
    except ImportError as error:
        raise MissingPackageError("ray[data]", "Running a batch on a cluster") from error
    if not missing:
        return
    ours = not ray.is_initialized()
    if ours:
        ray.init(
            address=None if address == "local" else address, log_to_driver=False, **_LOCAL if address == "local" else {}
        )
    gpus = 1 if models.device.startswith("cuda") else 0
    rows = (
        ray.data.from_items([{"index": index} for index in missing], override_num_blocks=min(len(missing), workers * 16))
        .map_batches(
            RayWorker, fn_constructor_args=(models, str(out.resolve()), jobs), batch_size=batch_size, concurrency=workers,
            num_gpus=gpus, num_cpus=1,
        )
        .iter_rows()
    )  # fmt: skip
    try:
        for row in rows:
            yield json.loads(row["row"])
    finally:
        if ours:
            ray.shutdown()
