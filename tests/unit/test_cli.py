"""The command line on tiny files, without ComfyUI (but with its tokenizer files)."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from host import REPO
from PIL import Image
from safetensors.torch import load_file, save_file

from anima.checkpoint.header import read_header
from anima.cli import main
from anima.convert import LAYOUTS, convert_dit
from anima.download import FILES, fetch, look_up
from anima.errors import AnimaError
from anima.inspection import inspect_file

COMMANDS = ["generate", "batch", "grid", "download", "inspect", "verify", "convert", "quantize", "lora", "demo-model"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    tiny.write_models(folder)
    return folder


def generate_arguments(models: Path, out: Path, *extra: str) -> list[str]:
    files = {"--dit": "diffusion_models", "--text-encoder": "text_encoders", "--vae": "vae"}
    where = [part for flag, folder in files.items() for part in (flag, str(models / folder / "tiny.safetensors"))]
    return ["generate", *where, "--prompt", "red circle", "--steps", "2", "--size", "64x48", "--out", str(out), *extra]


def generate(models: Path, out: Path, *extra: str) -> int:
    return main(generate_arguments(models, out, *extra))


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0 and command in capsys.readouterr().out


@pytest.mark.parametrize("sampler", ["euler", "dpmpp_2m", "er_sde"])
def test_generate_writes_a_png_with_its_graph(models: Path, tmp_path: Path, sampler: str) -> None:
    out = tmp_path / "picture.png"
    assert generate(models, out, "--sampler", sampler, "--seed", "7") == 0
    picture = Image.open(out)
    assert picture.size == (64, 48) and np.asarray(picture).std() > 3
    graph = json.loads(picture.info["prompt"])
    sampler_node = next(node for node in graph.values() if node["class_type"] == "KSampler")
    assert sampler_node["inputs"]["seed"] == 7 and sampler_node["inputs"]["sampler_name"] == sampler
    assert "Seed: 7" in picture.info["parameters"]


def test_generate_batch_image_to_image_and_inpaint(models: Path, tmp_path: Path) -> None:
    assert generate(models, tmp_path / "b.png", "--batch", "2", "--offload") == 0
    assert (tmp_path / "b_00.png").exists() and (tmp_path / "b_01.png").exists()
    Image.new("RGB", (64, 48), (200, 30, 30)).save(tmp_path / "in.png")
    mask = Image.new("L", (64, 48), 0)
    mask.paste(255, (32, 0, 64, 48))
    mask.save(tmp_path / "mask.png")
    assert generate(models, tmp_path / "i.png", "--image", str(tmp_path / "in.png"), "--denoise", "0.5") == 0
    assert (
        generate(models, tmp_path / "m.png", "--image", str(tmp_path / "in.png"), "--mask", str(tmp_path / "mask.png"))
        == 0
    )


@pytest.mark.parametrize(
    "extra,said",
    [(["--size", "63x48"], "multiples of 8"), (["--size", "big"], "size cannot be read"), (["--steps", "0"], "at least 1 step"),
     (["--sampler", "magic"], "magic"), (["--mask", "x.png"], "needs a picture"), (["--image", "none.png"], "cannot be read"),
     (["--dit", "/nonexistent.safetensors"], "cannot be read")],
)  # fmt: skip
def test_generate_says_what_is_wrong(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], extra: list[str], said: str
) -> None:
    assert generate(models, tmp_path / "x.png", *extra) == 1
    assert said in capsys.readouterr().err and not (tmp_path / "x.png").exists()


def test_inspect_names_what_is_missing(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "broken.safetensors"
    save_file({n: t for n, t in tiny.dit().items() if n != "final_layer.adaln_modulation.2.weight"}, path)
    assert inspect_file(path)["missing"] == ["final_layer.adaln_modulation.2.weight"]
    assert main(["inspect", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "anima_dit"


@pytest.mark.parametrize("first", [layout for layout in LAYOUTS if layout != "adapter"])
@pytest.mark.parametrize("second", ["original", "comfyui", "bare"])
def test_convert_round_trips_keep_the_bits(models: Path, tmp_path: Path, first: str, second: str) -> None:
    source = models / "diffusion_models" / "tiny.safetensors"
    middle = tmp_path / ("folder" if first == "diffusers" else "middle.safetensors")
    convert_dit(source, middle, first)
    convert_dit(middle, tmp_path / "end.safetensors", second)
    prefix = {"original": "net.", "comfyui": "model.diffusion_model.", "bare": ""}[second]
    end = load_file(tmp_path / "end.safetensors")
    assert end.keys() == {prefix + name for name in tiny.dit()}
    assert all(torch.equal(end[prefix + name], tensor) for name, tensor in tiny.dit().items())


def test_convert_extracts_and_merges_the_adapter(models: Path, tmp_path: Path) -> None:
    source = models / "diffusion_models" / "tiny.safetensors"
    convert_dit(source, tmp_path / "adapter.safetensors", "adapter")
    bare = {n: t for n, t in tiny.dit().items() if not n.startswith("llm_adapter.")}
    save_file(bare, tmp_path / "bare.safetensors")
    convert_dit(
        tmp_path / "bare.safetensors", tmp_path / "whole.safetensors", "bare", adapter=tmp_path / "adapter.safetensors"
    )
    assert load_file(tmp_path / "whole.safetensors").keys() == tiny.dit().keys()


def test_convert_refuses_to_overwrite_and_casts(models: Path, tmp_path: Path) -> None:
    source, target = models / "diffusion_models" / "tiny.safetensors", tmp_path / "t.safetensors"
    convert_dit(source, target, "bare", dtype="bf16")
    assert {info.dtype for info in read_header(target).tensors.values()} == {"BF16"}
    with pytest.raises(AnimaError, match="exists"):
        convert_dit(source, target, "bare")
    convert_dit(source, target, "bare", force=True)
    assert {info.dtype for info in read_header(target).tensors.values()} == {"F32"}


def test_killed_conversions_never_leave_half_a_file(models: Path, tmp_path: Path) -> None:
    """50 conversions, each in a forked process killed at a random moment."""
    source, target = models / "diffusion_models" / "tiny.safetensors", tmp_path / "t.safetensors"
    generator = np.random.default_rng(3)
    outcomes = set()
    for _ in range(50):
        target.unlink(missing_ok=True)
        child = os.fork()
        if child == 0:
            convert_dit(source, target, "comfyui")
            os._exit(0)
        time.sleep(generator.uniform(0, 0.12))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        outcomes.add(target.exists())
        if target.exists():
            assert len(load_file(target)) == len(tiny.dit())
    assert outcomes == {True, False}, "the moments were all too early or all too late"
    assert not [p for p in tmp_path.iterdir() if p.name != target.name and not p.name.endswith(".partial")]


def test_demo_model_files_are_complete(tmp_path: Path) -> None:
    from anima.demo.files import WEIGHTS

    if not WEIGHTS.exists():
        pytest.fail("the demo model's weights are not in the package")
    assert WEIGHTS.stat().st_size < 12e6
    assert main(["demo-model", "--out", str(tmp_path)]) == 0
    kinds = {path.name: inspect_file(path) for path in tmp_path.rglob("*.safetensors")}
    assert {report["kind"] for report in kinds.values()} == {"anima_dit", "qwen3", "wan_vae"}
    assert not any(report.get("missing") or report.get("unexpected") for report in kinds.values())


# Download, against a local stub of the hub


class Hub(http.server.BaseHTTPRequestHandler):
    content = bytes(range(256)) * 100_000
    etag = hashlib.sha256(content).hexdigest()
    cut_after: int | None = None
    ranges: list[str | None] = []

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        start = 0
        asked = self.headers.get("Range")
        if asked:
            start = int(asked.removeprefix("bytes=").split("-")[0])
        data = Hub.content[start:]
        self.send_response(206 if asked else 200)
        self.send_header("ETag", f'"{Hub.etag}"')
        self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Accept-Ranges", "bytes")
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{len(Hub.content) - 1}/{len(Hub.content)}")
        self.end_headers()
        if not body:
            return
        Hub.ranges.append(asked)
        if Hub.cut_after is not None:
            self.wfile.write(data[: Hub.cut_after])
            Hub.cut_after = None
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_WR)
            self.close_connection = True
            return
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[type[Hub]]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    import huggingface_hub.constants
    import huggingface_hub.file_download

    endpoint = f"http://127.0.0.1:{server.server_port}"
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    for module in (huggingface_hub.constants, huggingface_hub.file_download):
        if hasattr(module, "ENDPOINT"):
            monkeypatch.setattr(module, "ENDPOINT", endpoint)
        if hasattr(module, "HUGGINGFACE_CO_URL_TEMPLATE"):
            monkeypatch.setattr(module, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    Hub.cut_after, Hub.ranges = None, []
    Hub.etag = hashlib.sha256(Hub.content).hexdigest()
    yield Hub
    server.shutdown()


def test_download_puts_a_checked_file_in_place(hub: type[Hub], tmp_path: Path) -> None:
    assert look_up(FILES["vae"]).size == len(hub.content)
    path = fetch(FILES["vae"], tmp_path)
    assert path == tmp_path / "vae" / "qwen_image_vae.safetensors" and path.read_bytes() == hub.content
    hub.ranges.clear()
    assert fetch(FILES["vae"], tmp_path) == path and not hub.ranges, "what is there is kept"


def test_download_dry_run_lists_sizes_and_downloads_nothing(
    hub: type[Hub], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["download", "--dry-run", "--out", str(tmp_path / "models")]) == 0
    said = capsys.readouterr().out
    assert said.count("licence:") == 3 and said.count(" GB -> ") == 3 and not (tmp_path / "models").exists()


def test_download_resumes_after_a_cut_connection(hub: type[Hub], tmp_path: Path) -> None:
    hub.cut_after = 15_000_000  # the hub's library writes in pieces of 10 MB
    try:
        fetch(FILES["vae"], tmp_path)
    except AnimaError:
        fetch(FILES["vae"], tmp_path)
    assert (tmp_path / "vae" / "qwen_image_vae.safetensors").read_bytes() == hub.content
    assert any(asked and not asked.startswith("bytes=0-") for asked in hub.ranges), hub.ranges


def test_download_refuses_a_wrong_checksum(hub: type[Hub], tmp_path: Path) -> None:
    hub.etag = "0" * 64
    with pytest.raises(AnimaError, match="wrong checksum"):
        fetch(FILES["vae"], tmp_path)
    assert not (tmp_path / "vae" / "qwen_image_vae.safetensors").exists()


def test_download_survives_a_full_disk(hub: type[Hub], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 0))
    with pytest.raises(AnimaError, match="too little space"):
        fetch(FILES["vae"], tmp_path)


def test_installed_alone_it_generates_the_same_picture(models: Path, tmp_path: Path) -> None:
    """`pip install .` brings the package without the nodes; it runs from a folder where nothing else of ours is."""
    site, tokenizers = tmp_path / "site", Path(os.environ["COMFYUI_PATH"]) / "comfy" / "text_encoders"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site), str(REPO)]
    subprocess.run(install, check=True, capture_output=True)
    assert {path.name for path in site.iterdir() if "." not in path.name} == {"anima", "bin"}
    clean = {k: v for k, v in os.environ.items() if k != "COMFYUI_PATH"}
    environment = {**clean, "PYTHONPATH": str(site), "ANIMA_TOKENIZERS": str(tokenizers)}

    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "anima", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path, env=environment).stdout

    for command in COMMANDS:
        assert "usage: anima " + command in run(command, "--help")
    run(*generate_arguments(models, tmp_path / "alone.png"))
    assert generate(models, tmp_path / "here.png") == 0
    assert (np.asarray(Image.open(tmp_path / "alone.png")) == np.asarray(Image.open(tmp_path / "here.png"))).all()


def test_module_runs_as_a_command() -> None:
    out = subprocess.run(
        [sys.executable, "-m", "anima", "--version"], capture_output=True, text=True, check=True, cwd="/"
    )
    assert out.stdout.startswith("anima ")
