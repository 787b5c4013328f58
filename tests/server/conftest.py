from __future__ import annotations

from collections.abc import Iterator

import pytest
from server import Server, prepare_folder


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("server")
    prepare_folder(root)
    running = Server(root)
    yield running
    running.close()
