"""A real ComfyUI on the CPU, in process, with tiny models."""

from __future__ import annotations

import pytest
import tiny
import torch
from host import Host


@pytest.fixture(scope="session")
def host(tmp_path_factory: pytest.TempPathFactory) -> Host:
    root = tmp_path_factory.mktemp("comfy")
    tiny.write_models(root / "models")
    tiny.write_models(root / "models", torch.bfloat16, "tiny_bf16")
    (root / "models" / "loras").mkdir()
    return Host(root, ["--cpu"])
