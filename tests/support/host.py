"""A real ComfyUI inside the test process: graphs run through its own PromptExecutor."""

from __future__ import annotations

import asyncio
import copy
import importlib
import os
import sys
import uuid
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
Graph = dict[str, dict[str, Any]]


def comfyui_path() -> Path:
    """COMFYUI_PATH, which the test command sets."""
    path = os.environ.get("COMFYUI_PATH")
    if not path:
        raise RuntimeError("Set COMFYUI_PATH to a ComfyUI folder, or run the test command of the README.")
    return Path(path)


def fused_host() -> bool:
    """Whether the host's DiT fuses its gated residual, as ours does (0.30.0 does, 0.24.1 does not)."""
    source = comfyui_path() / "comfy" / "ldm" / "cosmos" / "predict2.py"
    return "addcmul" in source.read_text(encoding="utf-8")


class Capture:
    """A V1 node that keeps what reaches it, registered in the host for tests only."""

    store: dict[str, Any] = {}
    RETURN_TYPES = ()
    FUNCTION = "run"
    OUTPUT_NODE = True
    CATEGORY = "test"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"value": ("*",), "name": ("STRING", {"default": "out"})}}

    @classmethod
    def VALIDATE_INPUTS(cls, input_types: Any) -> bool:
        return True

    @classmethod
    def IS_CHANGED(cls, **_: Any) -> float:
        return float("nan")

    def run(self, value: Any, name: str) -> tuple[()]:
        Capture.store[name] = value
        return ()


class GraphError(Exception):
    """A node failed; `kind` is the exception's class name, `message` its text."""

    def __init__(self, kind: str, message: str):
        super().__init__(f"{kind}: {message}")
        self.kind, self.message = kind, message


class Host:
    """ComfyUI with its built-in nodes and this pack, loaded as ComfyUI loads packs.

    Args:
        root: Folder for models, input and output.
        flags: Command-line flags, e.g. `["--cpu"]`.
    """

    def __init__(self, root: Path, flags: list[str]):
        sys.path.insert(0, str(comfyui_path()))
        sys.argv = ["main.py", *flags]
        import comfy.options

        comfy.options.enable_args_parsing()
        import folder_paths

        folder_paths.base_path = str(root)
        for name in list(folder_paths.folder_names_and_paths):
            if name != "custom_nodes":
                extensions = folder_paths.folder_names_and_paths[name][1]
                folder_paths.folder_names_and_paths[name] = ([str(root / "models" / name)], extensions)
        folder_paths.models_dir = str(root / "models")
        for setter, name in (
            (folder_paths.set_output_directory, "output"),
            (folder_paths.set_input_directory, "input"),
            (folder_paths.set_temp_directory, "temp"),
        ):
            (root / name).mkdir(parents=True, exist_ok=True)
            setter(str(root / name))
        # Before nodes.py puts comfy/, which has a utils of its own, in front
        importlib.import_module("utils.install_util")
        import execution
        import server

        import nodes

        self.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self.loop)
        self.server = server.PromptServer(self.loop)
        self.loop.run_until_complete(nodes.init_extra_nodes(init_custom_nodes=False, init_api_nodes=False))
        loaded = self.loop.run_until_complete(nodes.load_custom_node(str(REPO)))
        if not loaded:
            raise RuntimeError("ComfyUI could not load the pack; see the log above.")
        nodes.NODE_CLASS_MAPPINGS["TestCapture"] = Capture
        self.nodes = nodes
        self.execution = execution
        self.root = root
        self.executor = execution.PromptExecutor(
            self.server,
            cache_type=execution.CacheType.LRU,
            cache_args={"lru": 100, "ram": 0.0, "ram_inactive": 0.0},
        )

    @property
    def pack(self) -> str:
        """The module name under which ComfyUI imported the pack."""
        return str(REPO).replace(".", "_x_")

    def module(self, name: str) -> Any:
        """A module of the pack, e.g. `anima.transformer`."""
        return importlib.import_module(f".{name}", self.pack)

    def run(self, graph: Graph, fresh: bool = False) -> dict[str, Any]:
        """Run an API-format graph and return what its TestCapture nodes caught.

        Args:
            fresh: Forget cached node outputs first.
        """
        if fresh:
            self.executor.reset()
        Capture.store = {}
        graph = copy.deepcopy(graph)  # ComfyUI writes into it
        prompt_id = str(uuid.uuid4())
        valid = self.loop.run_until_complete(self.execution.validate_prompt(prompt_id, graph, None))
        if not valid[0]:
            details = [e["details"] or e["message"] for n in valid[3].values() for e in n["errors"]]
            raise GraphError("ValidationError", f"{valid[1]} {details}")
        self.loop.run_until_complete(self.executor.execute_async(graph, prompt_id, {}, valid[2]))
        if not self.executor.success:
            error = next(data for event, data in self.executor.status_messages if event == "execution_error")
            raise GraphError(error["exception_type"].rsplit(".", 1)[-1], error["exception_message"])
        return Capture.store
