"""Batches: lazy job lists, resumption after any death, failures that stop nothing, galleries, Ray."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
import tarfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
import tiny
import torch
from host import REPO
from PIL import Image
from safetensors.torch import save_file

from anima.batch.grid import contact_sheet, gallery
from anima.batch.jobs import JobList, job_id, read_jobs
from anima.batch.run import FAILURES, MANIFEST, Manifest, rows_of, run_batch
from anima.batch.shards import pack_shards
from anima.batch.worker import Models
from anima.cli import main
from anima.errors import InputError

SMALL = {"width": 32, "height": 32, "steps": 1, "cfg": 1.0}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("models")
    tiny.write_models(folder)
    return Models(*(str(folder / part / "tiny.safetensors") for part in ("diffusion_models", "text_encoders", "vae")))


def arguments(models: Models) -> list[str]:
    return ["--dit", models.dit, "--text-encoder", models.text_encoder, "--vae", models.vae]


def jobs(count: int) -> JobList:
    return JobList([SMALL | {"prompt": "circle {color}"}], {"color": ["red", "blue"], "seed": range(count // 2)})


def content(folder: Path) -> dict[str, str]:
    """File -> sha256, from the manifest; every line is one picture that is there."""
    rows = [json.loads(line) for line in (folder / MANIFEST).read_text().splitlines()]
    assert len({row["id"] for row in rows}) == len(rows)
    assert {row["file"] for row in rows} == {path.name for path in folder.glob("*.png")}
    return {row["file"]: row["sha256"] for row in rows}


def test_job_files_of_every_kind(tmp_path: Path) -> None:
    expected = [{"prompt": "a", "seed": 1, "cfg": 2.5}, {"prompt": "b, c", "seed": 2}]
    (tmp_path / "j.jsonl").write_text("\n".join(map(json.dumps, expected)) + "\n\n")
    (tmp_path / "j.csv").write_text('prompt,seed,cfg\na,1,2.5\n"b, c",2,\n')
    (tmp_path / "j.yaml").write_text("- {prompt: a, seed: 1, cfg: 2.5}\n- {prompt: 'b, c', seed: 2}\n")
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    parquet.write_table(arrow.Table.from_pylist(expected), tmp_path / "j.parquet")
    for kind in ("jsonl", "csv", "yaml", "parquet"):
        assert list(read_jobs(tmp_path / f"j.{kind}")) == expected, kind


def test_a_matrix_is_every_combination(tmp_path: Path) -> None:
    (tmp_path / "artists.txt").write_text("wlop\n\nsakimichan\n")
    (tmp_path / "m.yaml").write_text(
        "prompt: '@{artist}, {subject}'\nloras: ['ink.safetensors:{strength}']\nsteps: 8\n"
        "matrix: {artist: artists.txt, subject: [cat, dog], seed: 3-5, strength: [0.5, 1]}\n"
    )
    found = read_jobs(tmp_path / "m.yaml")
    assert len(found) == 2 * 2 * 3 * 2
    assert found[0] == {"prompt": "@wlop, cat", "loras": ["ink.safetensors:0.5"], "steps": 8, "seed": 3}
    assert found[-1 + len(found)]["prompt"] == "@sakimichan, dog" and len({job_id(job) for job in found}) == len(found)


@pytest.mark.parametrize("name,text", [
    ("x.jsonl", "{"), ("x.jsonl", '{"seed": 1}'), ("x.jsonl", '{"prompt": "a", "colour": "red"}'), ("x.csv", "prompt,seed\na,one\n"),
    ("x.yaml", "matrix: [1]"), ("x.yaml", "a: [:"), ("x.txt", "a"),
])  # fmt: skip
def test_wrong_job_files_are_named(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError):
        list(read_jobs(tmp_path / name))


def test_a_hundred_thousand_jobs_take_little_memory() -> None:
    many = JobList([{"prompt": "{artist} {subject}"}], {"artist": range(1000), "subject": range(10), "seed": range(10)})
    tracemalloc.start()
    assert len(many) == 100_000 and len({job_id(many[i]) for i in range(0, len(many), 7)}) == -(-100_000 // 7)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 30_000_000


def test_a_second_run_makes_what_is_missing(models: Models, tmp_path: Path) -> None:
    first = run_batch(jobs(6), models, tmp_path)
    before = content(tmp_path)
    assert first.made == 6 and len(before) == 6
    again = run_batch(jobs(6), models, tmp_path)
    assert (again.made, again.there_already) == (0, 6)
    more = run_batch(jobs(8), models, tmp_path)
    assert (more.made, more.there_already) == (2, 6) and before.items() <= content(tmp_path).items()
    graph = json.loads(Image.open(next(tmp_path.glob("*.png"))).info["prompt"])
    assert any(node["class_type"] == "KSampler" for node in graph.values())


def test_failures_stop_nothing_and_are_listed(
    models: Models, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [SMALL | {"prompt": "a"}, SMALL | {"prompt": "b", "width": 33}, SMALL | {"prompt": "c", "loras": ["absent.safetensors"]},
             SMALL | {"prompt": "d"}]  # fmt: skip
    (tmp_path / "j.jsonl").write_text("\n".join(map(json.dumps, lines)))
    out = tmp_path / "out"
    assert main(["batch", str(tmp_path / "j.jsonl"), "--out", str(out), *arguments(models)]) == 1
    said = capsys.readouterr()
    assert "2 made, 0 were there already, 2 failed" in said.out and "cannot be made" in said.err
    failures = [json.loads(line) for line in (out / FAILURES).read_text().splitlines()]
    assert {row["job"]["prompt"] for row in failures} == {"b", "c"} and len(content(out)) == 2


def test_a_cut_line_is_taken_away(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_bytes(b'{"id": "a", "file": "a.png"}\n{"id": "b", "fi')
    manifest = Manifest(tmp_path)
    manifest.add({"id": "a"})
    manifest.add({"id": "b", "file": "b.png"})
    assert [json.loads(line)["id"] for line in (tmp_path / MANIFEST).read_text().splitlines()] == ["a", "b"]


def batch_command(models: Models, file: Path, out: Path, *options: str) -> Callable[[], subprocess.Popen[bytes]]:
    """Starts `anima batch` in a process of its own."""
    command = [sys.executable, "-m", "anima", "batch", str(file), "--out", str(out), *arguments(models), *options]
    environment = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    return lambda: subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=file.parent
    )


def wait_for_pictures(out: Path, count: int, process: subprocess.Popen[bytes], rng: random.Random) -> None:
    """Wait until there are this many pictures or the process has ended, and then a random moment."""
    deadline = time.monotonic() + 120
    while process.poll() is None and len(list(out.glob("*.png"))) < count:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    time.sleep(rng.random() * 0.02)


def seeds(file: Path, count: int) -> JobList:
    file.write_text(f"prompt: circle\nwidth: 32\nheight: 32\nsteps: 1\ncfg: 1\nmatrix: {{seed: 1-{count}}}\n")
    return read_jobs(file)


def test_killed_drivers_lose_and_double_nothing(models: Models, tmp_path: Path) -> None:
    """Fifteen kills of the driver at random moments; then the files are those of an undisturbed run."""
    kills, rng = 15, random.Random(1)
    file, out = tmp_path / "j.yaml", tmp_path / "out"
    run_batch(seeds(file, kills * 5), models, tmp_path / "undisturbed")
    start = batch_command(models, file, out)
    for _ in range(kills):
        process = start()
        wait_for_pictures(out, len(list(out.glob("*.png"))) + rng.randint(1, 4), process, rng)
        assert process.poll() is None, "ended before it was killed"
        process.kill()
        process.wait()
    assert start().wait(timeout=120) == 0
    assert content(out) == content(tmp_path / "undisturbed") and not list(out.glob("*.partial"))


@pytest.mark.parametrize("kills", [3, pytest.param(15, marks=pytest.mark.slow)])
def test_killed_ray_workers_lose_and_double_nothing(models: Models, tmp_path: Path, kills: int) -> None:
    """Kills of Ray actors at random moments, and one of the driver in between."""
    pytest.importorskip("ray")
    rng = random.Random(2)
    file, out = tmp_path / "j.yaml", tmp_path / "out"
    run_batch(seeds(file, kills * 40), models, tmp_path / "undisturbed")
    start = batch_command(models, file, out, "--ray", "local", "--workers", "2")
    process = start()
    for kill in range(kills):
        actors: list[psutil.Process] = []
        while not actors:
            wait_for_pictures(out, len(list(out.glob("*.png"))) + rng.randint(1, 20), process, rng)
            assert process.poll() is None, f"ended after {kill} kills"
            family = psutil.Process(process.pid).children(recursive=True)
            actors = [p for p in family if "MapWorker" in p.name()]
        rng.choice(actors).kill()
        if kill == kills // 2:
            process.kill()
            process.wait()
            process = start()
    assert process.wait(timeout=300) == 0
    assert content(out) == content(tmp_path / "undisturbed") and not list(out.glob("*.partial"))


def test_contact_sheet_and_gallery(models: Models, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_batch(jobs(6), models, tmp_path)
    contact_sheet(tmp_path, tmp_path / "sheet.png", 4, 64)
    assert Image.open(tmp_path / "sheet.png").size == (256, 2 * 98)
    gallery(tmp_path, tmp_path / "gallery.html", 64)
    page = (tmp_path / "gallery.html").read_text()
    assert page.count("<figure ") == 6 and page.count("data:image/png;base64,") == 6 and "http" not in page
    assert main(["grid", str(tmp_path / "nowhere"), "--out", str(tmp_path / "x.html")]) == 1
    assert "no batch in this folder" in capsys.readouterr().err


def test_jobs_of_one_lora_come_together(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix whose strength changes fastest loads each model once."""
    loads = []
    load = Models.load
    monkeypatch.setattr(Models, "load", lambda self: loads.append(1) or load(self))
    rng = torch.Generator().manual_seed(0)
    width = tiny.CONFIG.model_dim
    factors = {f"diffusion_model.blocks.0.self_attn.q_proj.lora_{k}.weight": torch.randn(shape, generator=rng)
               for k, shape in (("A", (2, width)), ("B", (width, 2)))}  # fmt: skip
    save_file(factors, tmp_path / "l.safetensors")
    axes = {"seed": range(3), "strength": [0.5, 1.0]}
    row = SMALL | {"prompt": "a", "loras": [f"{tmp_path / 'l.safetensors'}:{{strength}}"]}
    summary = run_batch(JobList([row], axes), models, tmp_path / "out")
    assert (summary.made, summary.failures, len(loads)) == (6, [], 2)


def test_batches_make_the_same_pictures(models: Models, tmp_path: Path) -> None:
    """Prompts of different lengths, samplers with noise, guidance: one batch of four equals four of one, but for rounding."""
    rows = [
        SMALL | {"prompt": p, "sampler": "er_sde", "steps": 3, "cfg": 3.0, "negative": n}
        for p, n in (("a", ""), ("red circle " * 300, ""), ("blue", "dog"), ("green", ""), ("x", "y"))
    ]
    run_batch(JobList(rows, {"seed": range(2)}), models, tmp_path / "one")
    run_batch(JobList(rows, {"seed": range(2)}), models, tmp_path / "four", batch_size=4)
    files = sorted(content(tmp_path / "one"))
    assert files == sorted(content(tmp_path / "four")) and len(files) == 10
    for file in files:
        one, four = (np.asarray(Image.open(tmp_path / run / file)).astype(int) for run in ("one", "four"))
        assert np.abs(one - four).max() <= 1 and one.std() > 1


def test_shards_are_webdatasets_and_grow(models: Models, tmp_path: Path) -> None:
    run_batch(jobs(6), models, tmp_path)
    shards = list(pack_shards(tmp_path, 4))
    full = shards[0].stat().st_mtime_ns
    assert [path.name for path in shards] == ["00000.tar", "00001.tar"]
    run_batch(jobs(8), models, tmp_path)
    shards = list(pack_shards(tmp_path, 4))
    assert shards[0].stat().st_mtime_ns == full
    found = {}
    for shard in shards:
        with tarfile.open(shard) as tar:
            found |= {name: tar.extractfile(name).read() for name in tar.getnames()}
    for row in rows_of(tmp_path):
        assert hashlib.sha256(found.pop(row["file"])).hexdigest() == row["sha256"]
        assert json.loads(found.pop(f"{row['id']}.json")) == row
        assert found.pop(f"{row['id']}.txt").decode() == row["job"]["prompt"]
    assert not found


def test_ray_makes_the_same_pictures(models: Models, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    run_batch(jobs(6), models, tmp_path / "here")
    run_batch(jobs(2), models, tmp_path / "ray")
    summary = run_batch(jobs(6), models, tmp_path / "ray", ray_address="local", workers=2)
    assert (summary.made, summary.there_already) == (4, 2)
    assert content(tmp_path / "ray") == content(tmp_path / "here")
