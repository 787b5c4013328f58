"""The table of docs/formats.md, measured: size and error of every format that `anima quantize` writes.

    python tools/formats.py DIT

Errors are relative (Frobenius norm) against the file given, of the matrices on average and of a whole forward pass.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch

from anima.quantize import FORMATS, forward_error, quantize_dit


def main() -> None:
    source = Path(sys.argv[1])
    print("| format | size | matrices | whole forward |\n| --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        for format in FORMATS:
            path = Path(folder) / ("x.gguf" if format.startswith("gguf") else "x.safetensors")
            report = quantize_dit(source, path, format, force=True)
            mean = sum(report.errors.values()) / len(report.errors)
            size = path.stat().st_size / source.stat().st_size
            print(
                f"| {format} | {size:.0%} | {mean:.4f} | {forward_error(source, path, torch.float32):.4f} |", flush=True
            )


if __name__ == "__main__":
    main()
