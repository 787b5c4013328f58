"""What makes the pictures: a loaded pipeline that keeps encoded prompts and changes LoRAs when a job asks."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from ..convert import DTYPES
from ..lora.files import apply_files, parse_lora_argument
from ..metadata import parameters_text, reproducing_graph, save_png
from ..pipeline import Pipeline
from .jobs import Job, job_id, request_of

PROMPTS_KEPT = 256


@dataclass(frozen=True)
class Models:
    """The files and how to load them."""

    dit: str
    text_encoder: str
    vae: str
    adapter: str | None = None
    dtype: str = "fp32"
    device: str = "cpu"

    def load(self) -> Pipeline:
        return Pipeline.load(
            self.dit, self.text_encoder, self.vae, adapter=self.adapter, dtype=DTYPES[self.dtype], device=self.device
        )


@dataclass
class Worker:
    """Makes pictures into a folder."""

    models: Models
    out: Path
    _pipelines: dict[tuple[str, ...], Pipeline] = field(default_factory=dict)

    def _pipeline(self, loras: tuple[str, ...]) -> Pipeline:
        """The pipeline with these LoRAs; only the last combination is kept in memory."""
        if loras not in self._pipelines:
            self._pipelines.clear()
            pipeline = self.models.load()
            apply_files(loras, pipeline.transformer, pipeline.text_encoder, lambda said: None)
            pipeline.encode = lru_cache(PROMPTS_KEPT)(pipeline.encode)  # type: ignore[method-assign]
            self._pipelines[loras] = pipeline
        return self._pipelines[loras]

    def make(self, job: Job) -> dict[str, Any]:
        """Make one picture.

        Returns:
            The manifest's row: id, file, sha256 of the file, seconds, job.
        """
        start = time.perf_counter()
        request = request_of(job)
        request.check()
        loras = tuple(job.get("loras", ()))
        pipeline = self._pipeline(loras)
        image = pipeline.decode(pipeline.sample(replace(request, batch=1)))[0]
        dit, text_encoder, vae = (Path(p).name for p in (self.models.dit, self.models.text_encoder, self.models.vae))
        used = [(Path(path).name, strength) for path, strength in map(parse_lora_argument, loras)]
        id = job_id(job)
        path = self.out / f"{id}.png"
        save_png(image, path, reproducing_graph(request, dit, text_encoder, vae, used), parameters_text(request, dit))
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        return {
            "id": id,
            "file": path.name,
            "sha256": digest,
            "seconds": round(time.perf_counter() - start, 3),
            "job": job,
        }

    def attempt(self, job: Job) -> dict[str, Any]:
        """`make`, or a row with the error: one job's failure must not end the others."""
        try:
            return self.make(job)
        except Exception as error:
            return {"id": job_id(job), "error": str(error), "job": job}


class RayWorker:
    """`Worker` for Ray Data's `map_batches`: a batch of job numbers in, rows out. Torch uses one thread on the CPU."""

    def __init__(self, models: Models, out: str, jobs: Any):
        if models.device == "cpu":
            torch.set_num_threads(1)
        self.worker, self.jobs = Worker(models, Path(out)), jobs

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[Any]]:
        rows = (self.worker.attempt(self.jobs[index]) for index in batch["index"].tolist())
        return {"row": [json.dumps(row, ensure_ascii=False) for row in rows]}
