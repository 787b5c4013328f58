"""The `anima` command. Each subcommand's work is done elsewhere; here are only its arguments and its output."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from . import __version__
from .errors import AnimaError


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; a user's error is printed without a traceback.

    Returns:
        The exit status: 0, or 1 after an error and for a comparison that found a difference.
    """
    args = _parser().parse_args(argv)
    if "dit" in args and "text_encoder" in args:
        args.text_encoder, args.vae = args.text_encoder or args.dit, args.vae or args.dit
    try:
        return args.run(args) or 0
    except AnimaError as error:
        print(f"anima {args.command}: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="anima", description="Anima text-to-image without ComfyUI.")
    parser.add_argument("--version", action="version", version=f"anima {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for add in (
        _add_generate,
        _add_batch,
        _add_grid,
        _add_download,
        _add_inspect,
        _add_verify,
        _add_convert,
        _add_quantize,
        _add_lora,
        _add_demo_model,
    ):
        add(commands)
    return parser


def _add_model_files(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--dit", required=True, help="the diffusion model: file, sharded index, diffusers folder, hub repo id"
    )
    command.add_argument("--text-encoder", help="Qwen3-0.6B; without it, that of --dit (a folder, repo or bundle)")
    command.add_argument("--vae", help="the Wan 2.1 / Qwen-Image VAE; without it, that of --dit")
    command.add_argument("--adapter", help="take the LLM adapter from this file")


def _add_generate(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser("generate", help="make pictures from a prompt")
    _add_model_files(command)
    command.add_argument("--prompt", required=True)
    command.add_argument("--negative", default="")
    command.add_argument("--size", default="1024x1024", metavar="WxH")
    command.add_argument("--steps", type=int, default=30)
    command.add_argument("--cfg", type=float, default=4.0)
    command.add_argument("--shift", type=float, default=3.0)
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--sampler", default="euler", help="euler, dpmpp_2m or er_sde")
    command.add_argument("--batch", type=int, default=1)
    command.add_argument("--image", type=Path, help="picture to start from (image-to-image)")
    command.add_argument("--mask", type=Path, help="white where the picture may change (inpainting; needs --image)")
    command.add_argument("--denoise", type=float, default=1.0, help="how much of --image to replace, 0 to 1")
    command.add_argument("--dtype", choices=["fp32", "bf16", "fp16"], default="fp32")
    command.add_argument("--device", default="cpu", help="cpu, cuda, mps, ...")
    command.add_argument("--offload", action="store_true", help="keep each part on the device only while it works")
    command.add_argument("--lora", action="append", default=[], metavar="FILE[:strength]", help="may be repeated")
    command.add_argument("--tile", type=int, help="decode in exact tiles of this many pixels")
    command.add_argument("--out", type=Path, default=Path("anima.png"))
    command.set_defaults(run=_generate)


def _generate(args: argparse.Namespace) -> None:
    from .generate import generate_files

    for path in generate_files(args):
        print(path)


def _add_batch(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser("batch", help="make the pictures of a job file; a second run makes what is missing")
    command.add_argument("jobs", type=Path, help=".jsonl, .csv, .yaml (with a matrix) or .parquet")
    command.add_argument("--out", type=Path, required=True, help="folder of the pictures and the manifest")
    _add_model_files(command)
    command.add_argument("--dtype", choices=["fp32", "bf16", "fp16"], default="fp32")
    command.add_argument("--device", default="cpu", help="cpu, cuda, mps, ...")
    command.add_argument("--ray", metavar="ADDRESS", help="run on a Ray cluster: its address, auto, or local")
    command.add_argument("--workers", type=int, default=1, help="actors on the cluster, each with its own model")
    command.add_argument(
        "--batch-size", type=int, default=1, help="pictures made together; above 1 the last bits may differ"
    )
    command.add_argument("--shards", type=int, metavar="N", help="also pack the pictures into WebDataset shards of N")
    command.set_defaults(run=_batch)


def _batch(args: argparse.Namespace) -> int:
    from tqdm import tqdm

    from .batch.jobs import read_jobs
    from .batch.run import FAILURES, run_batch
    from .batch.shards import pack_shards
    from .batch.worker import Models

    jobs = read_jobs(args.jobs)
    models = Models(args.dit, args.text_encoder, args.vae, args.adapter, args.dtype, args.device)
    failed = 0
    with tqdm(total=len(jobs), unit="picture", desc="made") as bar:

        def on_row(row: dict[str, object]) -> None:
            nonlocal failed
            failed += "error" in row
            bar.set_postfix(failures=failed, per_minute=f"{60 * (bar.format_dict['rate'] or 0):.1f}")
            bar.update()

        summary = run_batch(
            jobs,
            models,
            args.out,
            ray_address=args.ray,
            workers=args.workers,
            batch_size=args.batch_size,
            on_row=on_row,
        )
    if args.shards:
        for shard in pack_shards(args.out, args.shards):
            print(shard)
    print(f"{summary.made} made, {summary.there_already} were there already, {len(summary.failures)} failed")
    for row in summary.failures[:10]:
        print(f"{row['id']}: {str(row['error']).splitlines()[0]}", file=sys.stderr)
    if summary.failures:
        print(f"all failures: {args.out / FAILURES}", file=sys.stderr)
    return 1 if summary.failures else 0


def _add_grid(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser("grid", help="lay a batch out as a contact sheet (.png) or a gallery (.html)")
    command.add_argument("folder", type=Path, help="the batch's folder")
    command.add_argument("--out", type=Path, required=True, help="a .png or .html file")
    command.add_argument("--columns", type=int, default=8, help="of the contact sheet")
    command.add_argument("--side", type=int, default=256, help="of a picture, in pixels")
    command.set_defaults(run=_grid)


def _grid(args: argparse.Namespace) -> None:
    from .batch.grid import contact_sheet, gallery

    if args.out.suffix.lower() in (".html", ".htm"):
        gallery(args.folder, args.out, args.side)
    else:
        contact_sheet(args.folder, args.out, args.columns, args.side)
    print(args.out)


def _add_download(commands: argparse._SubParsersAction) -> None:
    from .download import FILES

    command = commands.add_parser("download", help="fetch the published files into a models folder")
    command.add_argument("files", nargs="*", help=f"of {', '.join(FILES)}; by default all but the LoRA")
    command.add_argument("--out", type=Path, required=True, help="a ComfyUI models folder")
    command.add_argument("--dry-run", action="store_true", help="list sizes and licences, download nothing")
    command.add_argument("--force", action="store_true", help="download again what is there")
    command.set_defaults(run=_download)


def _download(args: argparse.Namespace) -> None:
    from .download import FILES, fetch, look_up

    names = args.files or ["dit", "text-encoder", "vae"]
    unknown = [name for name in names if name not in FILES]
    if unknown:
        raise AnimaError("No such file is published.", found=", ".join(unknown), expected=", ".join(FILES))
    for name in names:
        file = FILES[name]
        print(f"{name}: {file.name} from {file.repo}\n  licence: {file.licence}")
        if args.dry_run:
            print(f"  {look_up(file).size / 1e9:.2f} GB -> {args.out / file.folder / file.name}")
        else:
            print(f"  {fetch(file, args.out, args.force)}")


def _add_inspect(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser("inspect", help="say what a file is, from its header alone")
    command.add_argument("file")
    command.add_argument("--json", action="store_true")
    command.set_defaults(run=_inspect)


def _inspect(args: argparse.Namespace) -> None:
    from .inspection import inspect_file

    _print_report(inspect_file(args.file), args.json)


def _print_report(report: dict[str, object], as_json: bool) -> None:
    if as_json:
        print(json.dumps(report, indent=2))
        return
    for key, value in report.items():
        if isinstance(value, list) and len(value) > 8:
            value = [*value[:8], f"... {len(value) - 8} more"]
        print(f"{key}: {value}")


def _add_verify(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser("verify", help="compare every stage with a reference, on your own files")
    _add_model_files(command)
    command.add_argument("--reference", choices=["comfyui", "diffusers"],
                         help="comfyui (the default) needs COMFYUI_PATH; diffusers knows no prompt weights")  # fmt: skip
    command.add_argument("--against", type=Path, help="compare with this saved report instead of a reference")
    command.add_argument("--save", type=Path, help="keep our side, to compare with on another machine or device")
    command.add_argument("--prompt", default="a red circle on a white background")
    command.add_argument("--negative", default="blurry")
    command.add_argument("--size", default="128x96", metavar="WxH")
    command.add_argument("--steps", type=int, default=4)
    command.add_argument("--cfg", type=float, default=4.0)
    command.add_argument("--shift", type=float, default=3.0)
    command.add_argument("--seed", type=int, default=1)
    command.add_argument("--dtype", choices=["fp32", "bf16", "fp16"], default="fp32")
    command.add_argument("--device", default="cpu", help="cpu, cuda, ...")
    command.add_argument("--json", action="store_true")
    command.set_defaults(run=_verify)


def _verify(args: argparse.Namespace) -> int:
    from .generate import read_size
    from .verify.ours import OurSide
    from .verify.recording import Job, Recording, record
    from .verify.report import compare

    width, height = read_size(args.size)
    job = Job(
        dit=args.dit, text_encoder=args.text_encoder, vae=args.vae, adapter=args.adapter, prompt=args.prompt,
        negative=args.negative, width=width, height=height, steps=args.steps, cfg=args.cfg, shift=args.shift,
        seed=args.seed, dtype=args.dtype, device=args.device,
    )  # fmt: skip
    ours = record(OurSide(job), job, "anima")
    if args.save:
        ours.save(args.save)
        print(args.save)
        if not (args.against or args.reference):
            return 0
    if args.against:
        reference = Recording.load(args.against)
    elif args.reference == "diffusers":
        from .verify.with_diffusers import DiffusersSide

        reference = record(DiffusersSide(job), job, "diffusers")
    else:
        from .verify.with_comfyui import record_comfyui

        reference = record_comfyui(job)
    report = compare(ours, reference)
    print(json.dumps(report.as_json(), indent=2) if args.json else report.as_text())
    return 0 if report.first_difference is None else 1


def _add_convert(commands: argparse._SubParsersAction) -> None:
    from .convert import DTYPES, LAYOUTS

    command = commands.add_parser("convert", help="write a diffusion model in another layout or dtype")
    command.add_argument("source")
    command.add_argument("target", type=Path)
    command.add_argument("--layout", choices=LAYOUTS, default="original")
    command.add_argument("--adapter", help="merge the LLM adapter of this file in")
    command.add_argument("--dtype", choices=DTYPES)
    command.add_argument("--force", action="store_true", help="replace existing files")
    command.set_defaults(run=_convert)


def _convert(args: argparse.Namespace) -> None:
    from tqdm import tqdm

    from .convert import convert_dit

    with tqdm(unit="B", unit_scale=True, desc="written") as bar:
        files = convert_dit(
            args.source, args.target, args.layout, adapter=args.adapter, dtype=args.dtype, force=args.force,
            on_bytes=bar.update,
        )  # fmt: skip
    for path in files:
        print(path)


def _add_quantize(commands: argparse._SubParsersAction) -> None:
    from .convert import DTYPES
    from .quantize import FORMATS

    command = commands.add_parser("quantize", help="write a smaller copy of a diffusion model")
    command.add_argument("source")
    command.add_argument("target", type=Path)
    command.add_argument("--format", choices=FORMATS, required=True)
    command.add_argument(
        "--keep", action="append", default=[], metavar="PATTERN", help="leave these tensors, e.g. 'blocks.0.*'"
    )
    command.add_argument(
        "--check", choices=DTYPES, help="also compare a whole forward pass in this dtype (needs memory for it)"
    )
    command.add_argument("--force", action="store_true", help="replace an existing file")
    command.set_defaults(run=_quantize)


def _quantize(args: argparse.Namespace) -> None:
    from tqdm import tqdm

    from .convert import DTYPES
    from .quantize import forward_error, quantize_dit

    with tqdm(unit="B", unit_scale=True, desc="written") as bar:
        report = quantize_dit(
            args.source, args.target, args.format, keep=args.keep, force=args.force, on_bytes=bar.update
        )  # fmt: skip
    print(report.text())
    if args.check:
        error = forward_error(args.source, args.target, DTYPES[args.check])
        print(f"relative error of a whole forward pass: {error:.5f}")
    print(args.target)


def _add_lora(commands: argparse._SubParsersAction) -> None:
    from .convert import DTYPES
    from .lora.convert import SPELLINGS

    actions = commands.add_parser("lora", help="inspect, convert, merge or extract LoRA files").add_subparsers(
        dest="action", required=True
    )
    inspect = actions.add_parser("inspect", help="what a LoRA changes")
    inspect.add_argument("file")
    inspect.add_argument("--json", action="store_true")
    inspect.set_defaults(run=_lora_inspect)
    convert = actions.add_parser("convert", help="write a LoRA under other names")
    convert.add_argument("source")
    convert.add_argument("target", type=Path)
    convert.add_argument("--spelling", choices=SPELLINGS, default="kohya")
    convert.set_defaults(run=_lora_convert)
    merge = actions.add_parser("merge", help="write a diffusion model with LoRAs merged in")
    merge.add_argument("dit")
    merge.add_argument("loras", nargs="+", metavar="FILE[:strength]")
    merge.add_argument("--out", type=Path, required=True)
    merge.add_argument("--dtype", choices=DTYPES)
    merge.set_defaults(run=_lora_merge)
    extract = actions.add_parser("extract", help="the difference of two diffusion models as a LoRA")
    extract.add_argument("base")
    extract.add_argument("tuned")
    extract.add_argument("--out", type=Path, required=True)
    extract.add_argument("--rank", type=int, default=32)
    extract.set_defaults(run=_lora_extract)
    for command in (convert, merge, extract):
        command.add_argument("--force", action="store_true", help="replace an existing file")


def _lora_inspect(args: argparse.Namespace) -> None:
    from .lora.convert import inspect_lora

    _print_report(inspect_lora(args.file), args.json)


def _lora_convert(args: argparse.Namespace) -> None:
    from .lora.convert import convert_lora

    left_out = convert_lora(args.source, args.target, args.spelling, args.force)
    print(args.target)
    for name in left_out:
        print(f"left out, not a name of Anima's: {name}", file=sys.stderr)


def _lora_merge(args: argparse.Namespace) -> None:
    from tqdm import tqdm

    from .lora.convert import merge_loras

    with tqdm(unit="B", unit_scale=True, desc="written") as bar:
        reports = merge_loras(
            args.dit, args.loras, args.out, dtype=args.dtype, force=args.force, on_bytes=bar.update
        )  # fmt: skip
    print(*reports, args.out, sep="\n")


def _lora_extract(args: argparse.Namespace) -> None:
    from tqdm import tqdm

    from .lora.convert import extract_lora

    with tqdm(desc="tensors") as bar:

        def step(done: int, total: int) -> None:
            bar.total = total
            bar.update()

        error = extract_lora(args.base, args.tuned, args.out, args.rank, force=args.force, on_tensor=step)
    print(f"{args.out}\nrelative error of rank {args.rank}: {error:.4f}")


def _add_demo_model(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser("demo-model", help="write the bundled demo model's files into a models folder")
    command.add_argument("--out", type=Path, required=True, help="a ComfyUI models folder")
    command.set_defaults(run=_demo_model)


def _demo_model(args: argparse.Namespace) -> None:
    from .demo.files import write_demo_model

    for path in write_demo_model(args.out):
        print(path)
