"""The `anima` command. Each subcommand's work is done elsewhere; here are only its arguments and its output."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from . import __version__
from .errors import AnimaError


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; a user's error is printed without a traceback.

    Returns:
        The exit status: 0, or 1 after an error.
    """
    args = _parser().parse_args(argv)
    try:
        return args.run(args) or 0
    except AnimaError as error:
        print(f"anima {args.command}: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="anima", description="Anima text-to-image without ComfyUI.")
    parser.add_argument("--version", action="version", version=f"anima {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_demo_model(commands)
    return parser


def _add_demo_model(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser("demo-model", help="write the bundled demo model's files into a models folder")
    command.add_argument("--out", type=Path, required=True, help="a ComfyUI models folder")
    command.set_defaults(run=_demo_model)


def _demo_model(args: argparse.Namespace) -> None:
    from .demo.files import write_demo_model

    for path in write_demo_model(args.out):
        print(path)
