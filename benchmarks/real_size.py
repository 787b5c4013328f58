"""Load the released architecture (2048 wide, 28 blocks, random bf16 weights, 4.2 GB) and run one sampling step.

    python benchmarks/real_size.py [--keep FOLDER] [--dtype bf16]

Ours (AnimaUNetLoader) and native (UNETLoader) run one after the other, each in a process of its own, on the same
file; load time, step time and peak resident memory are printed side by side. Needs COMFYUI_PATH.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO / "tests" / "support"))
NAME = "anima_random_bf16.safetensors"


def write_model(models: Path) -> None:
    """A file in the release's layout (`net.` prefix), written tensor by tensor."""
    import torch
    from safetensors.torch import save_file

    from anima.checkpoint.dit import expected_shapes
    from anima.config import AnimaConfig

    path = models / "diffusion_models" / NAME
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, shape in expected_shapes(AnimaConfig()).items():
        scale = 1.0 if len(shape) == 1 else 0.5 * shape[-1] ** -0.5
        offset = 1.0 if len(shape) == 1 and "norm" in name else 0.0
        tensors["net." + name] = torch.empty(shape, dtype=torch.bfloat16).normal_(
            offset, 0.02 * scale, generator=generator
        )
    save_file(tensors, path)


def peak_rss() -> float:
    """Peak resident memory of this process in GB, mapped file pages included (Linux)."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split("VmHWM:")[1].split()[0]) / 1e6


def measure(loader: str, root: Path, dtype: str) -> None:
    """Run in the child process: load, one step at 256x256, print the figures as JSON."""
    from host import Host

    host = Host(root, ["--cpu"])
    baseline = peak_rss()
    graph = {
        "m": {"class_type": loader, "inputs": {"unet_name": NAME, "weight_dtype": dtype}},
        "o": {"class_type": "TestCapture", "inputs": {"value": ["m", 0], "name": "model"}},
    }
    start = time.perf_counter()
    model = host.run(graph)["model"]
    load_seconds, load_peak = time.perf_counter() - start, peak_rss()

    import comfy.sample
    import torch

    context = torch.zeros(1, 512, 1024)
    context[:, :20] = torch.randn(1, 20, 1024, generator=torch.Generator().manual_seed(1))
    noise = torch.randn(1, 16, 1, 32, 32, generator=torch.Generator().manual_seed(2))
    start = time.perf_counter()
    with torch.inference_mode():
        conditioning = [[context, {"anima_finished_context": True}]]
        latent = comfy.sample.sample(
            model, noise, 1, 1.0, "euler", "simple", conditioning, conditioning, torch.zeros_like(noise), seed=1
        )
    figures = {
        "load s": load_seconds, "step s": time.perf_counter() - start, "baseline GB": baseline,
        "peak after load GB": load_peak, "peak after step GB": peak_rss(), "latent std": latent.std().item(),
        "blocks": len(model.model.diffusion_model.blocks), "checksum": latent.double().sum().item(),
    }  # fmt: skip
    print("FIGURES " + json.dumps(figures))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, help="folder to keep the model file in")
    parser.add_argument(
        "--dtype", default="default", help="weight_dtype of both loaders: default, fp8_e4m3fn, fp8_e5m2"
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        measure(args.child, args.keep, args.dtype)
        return
    with tempfile.TemporaryDirectory() as temporary:
        root = (args.keep or Path(temporary)).resolve()
        write_model(root / "models")
        size = (root / "models" / "diffusion_models" / NAME).stat().st_size
        print(f"file: {size / 1e9:.2f} GB")
        results = {}
        for label, loader in (("native", "UNETLoader"), ("ours", "AnimaUNetLoader")):
            command = [sys.executable, __file__, "--child", loader, "--keep", str(root), "--dtype", args.dtype]
            out = subprocess.run(command, capture_output=True, text=True, env=os.environ)
            lines = [line for line in out.stdout.splitlines() if line.startswith("FIGURES ")]
            if not lines:
                sys.exit(out.stderr[-3000:])
            results[label] = json.loads(lines[0].removeprefix("FIGURES "))
        for key in results["ours"]:
            print(f"{key:20} native {results['native'][key]:12.4f}   ours {results['ours'][key]:12.4f}")


if __name__ == "__main__":
    main()
