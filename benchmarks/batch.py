"""A batch of the demo model's pictures: in a plain loop, by `anima batch` here, and on Ray with one and two workers.

    python benchmarks/batch.py [--jobs 2000] [--steps 4]

Each picture is made on one CPU thread. Prints seconds and ratios; ends with an error when any picture's bytes differ.
Needs the tokenizers (COMFYUI_PATH or ANIMA_TOKENIZERS) and Ray.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from anima.batch.jobs import JobList, request_of
from anima.batch.run import rows_of, run_batch
from anima.batch.worker import Models
from anima.demo.files import write_demo_model
from anima.metadata import parameters_text, reproducing_graph, save_png

COLORS, SHAPES = ("red", "green", "blue", "yellow"), ("circle", "square", "star", "heart", "ring")


def loop(models: Models, jobs: JobList, out: Path) -> None:
    """What a user would write by hand: the pipeline, encoded prompts kept, and PNGs with their graph."""
    pipeline = models.load()
    pipeline.encode = lru_cache(256)(pipeline.encode)  # type: ignore[method-assign]
    names = tuple(Path(path).name for path in (models.dit, models.text_encoder, models.vae))
    for index in range(len(jobs)):
        request = request_of(jobs[index])
        image = pipeline.decode(pipeline.sample(request))[0]
        save_png(
            image, out / f"{index}.png", reproducing_graph(request, *names, []), parameters_text(request, models.dit)
        )


def seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2000, help="a multiple of 20")
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    torch.set_num_threads(1)
    row = {"prompt": "{color} {shape}, white background", "width": 128, "height": 128, "steps": args.steps}
    jobs = JobList([row], {"color": COLORS, "shape": SHAPES, "seed": range(args.jobs // 20)})
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_demo_model(folder / "models")
        files = (folder / "models" / kind for kind in ("diffusion_models", "text_encoders", "vae"))
        models = Models(*(str(next(kind.glob("*.safetensors"))) for kind in files))
        (folder / "loop").mkdir()
        took = {
            "loop": seconds(lambda: loop(models, jobs, folder / "loop")),
            "here": seconds(lambda: run_batch(jobs, models, folder / "here")),
        }
        for workers in (1, 2):
            name = f"ray {workers}"
            took[name] = seconds(
                lambda: run_batch(jobs, models, folder / name, ray_address="local", workers=workers)  # noqa: B023
            )
        content = {
            name: {row["file"]: row["sha256"] for row in rows_of(folder / name)} for name in took if name != "loop"
        }
    for name, time_taken in took.items():
        print(f"{name:6} {time_taken:8.1f} s  {60 * len(jobs) / time_taken:7.1f} pictures/min")
    print(f"overhead of here over the loop {100 * (took['here'] / took['loop'] - 1):+.1f} %")
    print(f"ray 1 / here {took['here'] / took['ray 1']:.2f}x, ray 2 / ray 1 {took['ray 1'] / took['ray 2']:.2f}x")
    if any(len(found) != len(jobs) or found != content["here"] for found in content.values()):
        raise SystemExit("The runs differ.")
    print(f"{len(jobs)} pictures, equal bytes in all runs")


if __name__ == "__main__":
    main()
