"""Job files: a list of jobs, or a matrix of which every combination is a job, expanded one at a time."""

from __future__ import annotations

import csv
import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from ..errors import InputError, MissingPackageError
from ..pipeline import Request

NUMBERS = {"width": int, "height": int, "steps": int, "seed": int, "cfg": float, "shift": float, "denoise": float}
KEYS = {field.name for field in fields(Request)} - {"batch"} | {"loras"}
"""What a job may say; `loras` is a list of FILE[:strength]."""

Job = dict[str, Any]


class JobList(Sequence[Job]):
    """Jobs by number, made when asked for.

    Args:
        rows: Jobs that are spelled out, or a single template.
        axes: Name -> values; every combination fills the template's `{name}` places.
        defaults: What jobs leave unsaid.
    """

    def __init__(
        self, rows: Sequence[Job], axes: Mapping[str, Sequence[Any]] | None = None, defaults: Job | None = None
    ):
        self.rows, self.axes, self.defaults = rows, dict(axes or {}), defaults or {}
        self._combinations = math.prod(map(len, self.axes.values()))

    def __len__(self) -> int:
        return len(self.rows) * self._combinations

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        row, place = divmod(index, self._combinations)
        chosen: dict[str, Any] = {}
        for name, values in reversed(self.axes.items()):
            place, choice = divmod(place, len(values))
            chosen[name] = values[choice]
        job = {**self.defaults, **self.rows[row]}
        job |= {name: value for name, value in chosen.items() if name in KEYS and name not in self.rows[row]}
        return check_job({key: _filled(value, chosen) for key, value in job.items()}, index)


def _filled(value: Any, chosen: Mapping[str, Any]) -> Any:
    if isinstance(value, list):
        return [_filled(item, chosen) for item in value]
    if not isinstance(value, str):
        return value
    return re.sub(r"\{(\w+)\}", lambda match: str(chosen.get(match[1], match[0])), value)


def check_job(job: Job, index: int) -> Job:
    """A job with numbers as numbers.

    Raises:
        InputError: an unknown key, no prompt, or a value that cannot be read.
    """
    unknown = set(job) - KEYS
    if unknown or not isinstance(job.get("prompt"), str):
        raise InputError(
            "A job cannot be read.", found=f"job {index}: {', '.join(sorted(unknown)) or 'no prompt'}",
            expected=f"a prompt and any of {', '.join(sorted(KEYS))}",
        )  # fmt: skip
    out = {}
    for key, value in job.items():
        try:
            out[key] = NUMBERS[key](value) if key in NUMBERS else value
        except (TypeError, ValueError) as error:
            raise InputError("A job cannot be read.", found=f"job {index}: {key} = {value!r}") from error
    if isinstance(out.get("loras"), str):
        out["loras"] = out["loras"].split()
    return out


def request_of(job: Job) -> Request:
    """The pipeline's request for a job."""
    return Request(**{key: value for key, value in job.items() if key != "loras"})


def job_id(job: Job) -> str:
    """16 hex digits that name a job by what it makes, whatever its place in the file."""
    return hashlib.sha256(json.dumps(_complete(job), sort_keys=True, ensure_ascii=False).encode()).hexdigest()[:16]


def _complete(job: Job) -> Job:
    return {f.name: f.default for f in fields(Request) if f.default is not MISSING} | {"loras": []} | job


def in_batches(jobs: Iterable[Job], size: int) -> Iterator[list[Job]]:
    """Neighbours that can run as one batch, at most `size` together."""
    for _, alike in groupby(jobs, key=batch_key):
        while batch := list(islice(alike, size)):
            yield batch


def batch_key(job: Job) -> str:
    """Equal for jobs that may differ in prompt, negative and seed only; their order puts jobs of one LoRA together."""
    full = _complete(job)
    return json.dumps([full.pop("loras"), {k: v for k, v in full.items() if k not in ("prompt", "negative", "seed")}])


def read_jobs(path: Path, defaults: Job | None = None) -> JobList:
    """Read a job file.

    Args:
        path: `.jsonl` (a job a line), `.csv` (a job a row), `.parquet`, or `.yaml`: a list of jobs, or a mapping with
            `matrix` (name -> list, `first-last` or a text file of lines) whose other keys are the template.
        defaults: What jobs leave unsaid.

    Raises:
        InputError: it cannot be read.
    """
    try:
        kind = path.suffix.lower()
        if kind == ".jsonl":
            lines = path.read_text(encoding="utf-8").splitlines()
            return JobList([json.loads(line) for line in lines if line.strip()], defaults=defaults)
        if kind == ".csv":
            with path.open(encoding="utf-8", newline="") as file:
                rows = [{k: v for k, v in row.items() if v not in ("", None)} for row in csv.DictReader(file)]
            return JobList(rows, defaults=defaults)
        if kind == ".parquet":
            return JobList(_parquet(path), defaults=defaults)
        if kind in (".yaml", ".yml"):
            return _from_yaml(path, defaults)
    except (OSError, ValueError, AttributeError) as error:
        raise InputError("The job file cannot be read.", file=path, found=str(error)[:300]) from error
    raise InputError("The job file is of an unknown kind.", file=path, expected=".jsonl, .csv, .yaml or .parquet")


def _parquet(path: Path) -> list[Job]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise MissingPackageError("pyarrow", "Reading Parquet job files") from error
    rows = pyarrow.parquet.read_table(path).to_pylist()
    return [{k: v for k, v in row.items() if v is not None} for row in rows]


def _from_yaml(path: Path, defaults: Job | None) -> JobList:
    try:
        import yaml
    except ImportError as error:
        raise MissingPackageError("pyyaml", "Reading YAML job files") from error
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(error) from error
    if isinstance(content, list):
        return JobList(content, defaults=defaults)
    if not isinstance(content, dict) or not isinstance(content.get("matrix"), dict):
        raise ValueError("neither a list of jobs nor a mapping with a matrix")
    axes = {name: _axis(values, path.parent) for name, values in content.pop("matrix").items()}
    return JobList([content], axes, defaults)


def _axis(values: Any, folder: Path) -> Sequence[Any]:
    if isinstance(values, list):
        return values
    span = re.fullmatch(r"(\d+)-(\d+)", str(values))
    if span:
        return range(int(span[1]), int(span[2]) + 1)
    return [line.strip() for line in (folder / str(values)).read_text(encoding="utf-8").splitlines() if line.strip()]
