"""Shared by all test groups."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cuda: needs an NVIDIA GPU")
    config.addinivalue_line("markers", "slow: takes longer than two minutes")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A running ComfyUI server with tiny models; a `support/server.py` Server."""
    from server import Server, prepare_folder

    root = tmp_path_factory.mktemp("server")
    prepare_folder(root)
    running = Server(root)
    yield running
    running.close()
