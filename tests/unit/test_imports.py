"""The dependency rule, checked on the source and in a subprocess."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
HOST_MODULES = {
    "comfy",
    "comfy_api",
    "comfy_extras",
    "comfy_execution",
    "folder_paths",
    "server",
    "execution",
    "node_helpers",
}


def imported_roots(path: Path) -> set[str]:
    roots = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            roots |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            roots.add(node.module.split(".")[0])
    return roots


def relative_escapes(path: Path) -> list[str]:
    """Relative imports that leave the `anima` package."""
    depth = len(path.relative_to(REPO / "anima").parts)
    return [
        ast.unparse(node) for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.level > depth
    ]  # fmt: skip


def test_anima_imports_neither_comfy_nor_the_other_folders() -> None:
    files = list((REPO / "anima").rglob("*.py"))
    assert len(files) > 10
    for path in files:
        assert not imported_roots(path) & (HOST_MODULES | {"nodes", "latent_formats", "tests", "anima"}), path
        assert not relative_escapes(path), path


def test_inside_the_pack_all_imports_are_relative() -> None:
    for folder in ("nodes", "latent_formats"):
        for path in (REPO / folder).rglob("*.py"):
            assert not imported_roots(path) & {"anima", "latent_formats", "tests"}, path


def test_anima_never_imports_comfy_at_run_time() -> None:
    code = (
        "import sys, pkgutil, importlib, anima\n"
        "for m in pkgutil.walk_packages(anima.__path__, 'anima.'):\n"
        "    m.name.endswith('__main__') or importlib.import_module(m.name)\n"
        "bad = [m for m in sys.modules if m.split('.')[0] in ('comfy', 'folder_paths', 'nodes', 'transformers', 'diffusers')]\n"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd="/")
