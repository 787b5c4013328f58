"""A real ComfyUI server in a child process, with this pack and tiny models under the official file names."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import tiny
import torch
from host import REPO, Graph, comfyui_path
from PIL import Image
from safetensors.torch import save_file

WORKFLOWS = sorted(path.stem for path in (REPO / "example_workflows" / "api").glob("*.json"))
OFFICIAL_NAMES = {
    "diffusion_models": "anima-base-v1.0", "text_encoders": "qwen_3_06b_base", "vae": "qwen_image_vae",
}  # fmt: skip
LLLITE_NAMES = {"anima-lllite-any-test-like-v2": 3, "anima-lllite-depth-1": 3, "anima-lllite-inpainting-v2": 4}
START_SECONDS = 240


def prepare_folder(root: Path) -> None:
    """Models, a LoRA, an input picture with a hole in its alpha, and a link to the pack."""
    tiny.write_models(root / "models")
    for folder, name in OFFICIAL_NAMES.items():
        (root / "models" / folder / "tiny.safetensors").rename(root / "models" / folder / f"{name}.safetensors")
    lora = {}
    for module, (rows, columns) in {"blocks_0_self_attn_q_proj": (96, 96), "blocks_2_mlp_layer1": (384, 96)}.items():
        generator = torch.Generator().manual_seed(rows)
        lora[f"lora_unet_{module}.lora_down.weight"] = torch.randn(4, columns, generator=generator) / columns**0.5
        lora[f"lora_unet_{module}.lora_up.weight"] = torch.randn(rows, 4, generator=generator) / 2
        lora[f"lora_unet_{module}.alpha"] = torch.tensor(4.0)
    (root / "models" / "loras").mkdir(parents=True)
    save_file(lora, root / "models" / "loras" / "anima-turbo-lora-v0.2.safetensors")
    (root / "models" / "model_patches").mkdir()
    for name, channels in LLLITE_NAMES.items():
        save_file(tiny.lllite(channels), root / "models" / "model_patches" / f"{name}.safetensors")
    picture = np.full((64, 64, 4), 255, np.uint8)
    picture[16:48, 16:48] = (220, 30, 30, 0)
    (root / "input").mkdir()
    Image.fromarray(picture).save(root / "input" / "example.png")
    (root / "custom_nodes").mkdir()
    (root / "custom_nodes" / "anima-nodes").symlink_to(REPO, target_is_directory=True)


class Server:
    """Starts on construction; `close` ends it."""

    def __init__(self, root: Path, flags: tuple[str, ...] = ("--cpu",), path: Path | None = None):
        self.root = root
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.log_path = root / "server.log"
        self.command = [
            sys.executable, "main.py", "--port", str(self.port), "--base-directory", str(root),
            "--disable-auto-launch", "--disable-api-nodes", *flags,
        ]  # fmt: skip
        self.comfyui = path or comfyui_path()
        self.start()

    def start(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                self.command, cwd=self.comfyui, env=environment, stdout=log, stderr=subprocess.STDOUT
            )
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                self.get("/system_stats")
                return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.2)
        raise RuntimeError(f"the server did not start:\n{self.log()[-3000:]}")

    def log(self) -> str:
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def url(self, path: str = "") -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def get(self, path: str) -> bytes:
        with urllib.request.urlopen(self.url(path), timeout=60) as response:
            return response.read()

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url(path), data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, json.loads(response.read() or b"null")
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read() or b"null")

    def queue(self, graph: Graph) -> str:
        status, answer = self.post("/prompt", {"prompt": graph, "client_id": uuid.uuid4().hex})
        assert status == 200, answer
        return answer["prompt_id"]

    def wait(self, prompt_id: str, seconds: float = 240) -> dict[str, Any]:
        """The history entry of a finished prompt."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            history = json.loads(self.get(f"/history/{prompt_id}"))
            if prompt_id in history and history[prompt_id]["status"].get("status_str"):
                return history[prompt_id]
            assert self.process.poll() is None, self.log()[-3000:]
            time.sleep(0.05)
        raise TimeoutError(f"prompt {prompt_id} did not finish:\n{self.log()[-2000:]}")

    def run(self, graph: Graph) -> list[np.ndarray]:
        """Queue, wait, and return the saved pictures (uint8); a failure raises with the node's message."""
        entry = self.wait(self.queue(graph))
        if entry["status"]["status_str"] != "success":
            raise PromptError(entry)
        images = [image for output in entry["outputs"].values() for image in output.get("images", [])]
        return [
            np.asarray(Image.open(self.root / image["type"] / image["subfolder"] / image["filename"]))
            for image in images
        ]


class PromptError(Exception):
    """A prompt failed; `message` is what ComfyUI shows."""

    def __init__(self, entry: dict[str, Any]):
        errors = [data for kind, data in entry["status"]["messages"] if kind == "execution_error"]
        self.message = errors[0]["exception_message"] if errors else str(entry["status"])
        super().__init__(self.message)


def shipped_workflow(name: str, size: int = 64, steps: int = 2) -> Graph:
    """A shipped API workflow, made small."""
    graph = json.loads((REPO / "example_workflows" / "api" / f"{name}.json").read_text(encoding="utf-8"))
    for node in graph.values():
        inputs = node["inputs"]
        if "steps" in inputs:
            inputs["steps"] = steps
        if node["class_type"] == "AnimaEmptyLatent":
            inputs |= {"width": size, "height": size}
    return graph
