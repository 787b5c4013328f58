"""What makes the pictures: a loaded pipeline that keeps encoded prompts and changes LoRAs when a job asks."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..convert import DTYPES
from ..lora.files import apply_files, parse_lora_argument
from ..metadata import parameters_text, reproducing_graph, save_png
from ..pipeline import Pipeline, Request
from .jobs import Job, in_batches, job_id, request_of

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

    def make(self, jobs: list[Job]) -> list[dict[str, Any]]:
        """Make the pictures of jobs that differ in prompt, negative and seed only, as one batch.

        Returns:
            The manifest's rows: id, file, sha256 of the file, seconds (each picture's share of the batch), job.
        """
        start = time.perf_counter()
        loras = tuple(jobs[0].get("loras", ()))
        requests = [request_of(job) for job in jobs]
        for request in requests:
            request.check()
        pipeline = self._pipeline(loras)
        if (
            len({pipeline.context(request).shape for request in requests}) > 1
        ):  # zero rows would change the shorter ones
            return [row for job in jobs for row in self.make([job])]
        images = pipeline.decode(pipeline.sample(requests))
        share = (time.perf_counter() - start) / len(jobs)
        return [self._save(*made, share) for made in zip(jobs, requests, images, strict=True)]

    def _save(self, job: Job, request: Request, image: Tensor, seconds: float) -> dict[str, Any]:
        start = time.perf_counter()
        dit, text_encoder, vae = (Path(p).name for p in (self.models.dit, self.models.text_encoder, self.models.vae))
        used = [(Path(path).name, strength) for path, strength in map(parse_lora_argument, job.get("loras", ()))]
        path = self.out / f"{job_id(job)}.png"
        save_png(image, path, reproducing_graph(request, dit, text_encoder, vae, used), parameters_text(request, dit))
        return {
            "id": path.stem,
            "file": path.name,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "seconds": round(seconds + time.perf_counter() - start, 3),
            "job": job,
        }

    def attempt(self, jobs: list[Job]) -> list[dict[str, Any]]:
        """`make`, or rows with the error: one job's failure must not end the others."""
        try:
            return self.make(jobs)
        except Exception as error:
            if len(jobs) > 1:
                return [row for job in jobs for row in self.attempt([job])]
            return [{"id": job_id(jobs[0]), "error": str(error), "job": jobs[0]}]


class RayWorker:
    """`Worker` for Ray Data's `map_batches`: a batch of job numbers in, rows out. Torch uses one thread on the CPU."""

    def __init__(self, models: Models, out: str, jobs: Any):
        if models.device == "cpu":
            torch.set_num_threads(1)
        self.worker, self.jobs = Worker(models, Path(out)), jobs

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[Any]]:
        jobs = [self.jobs[index] for index in batch["index"].tolist()]
        rows = [row for alike in in_batches(jobs, len(jobs)) for row in self.worker.attempt(alike)]
        return {"row": [json.dumps(row, ensure_ascii=False) for row in rows]}
