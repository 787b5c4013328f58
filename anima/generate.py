"""What `anima generate` does: load, sample with a progress bar, decode, save PNGs that reproduce themselves."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from .convert import DTYPES
from .errors import InputError
from .lora.files import apply_files, parse_lora_argument
from .metadata import parameters_text, reproducing_graph, save_png
from .pipeline import Pipeline, Request
from .vae import SPATIAL_FACTOR


def generate_files(args: argparse.Namespace) -> list[Path]:
    """Make the pictures of a parsed `anima generate` command line and return their paths."""
    request = _request(args)
    request.check()
    pipeline = Pipeline.load(
        args.dit, args.text_encoder, args.vae, adapter=args.adapter, dtype=DTYPES[args.dtype], device=args.device,
        offload=args.offload,
    )  # fmt: skip
    apply_files(args.lora, pipeline.transformer, pipeline.text_encoder, lambda said: tqdm.write(said, sys.stderr))
    init = mask = None
    if args.image:
        init = pipeline.encode_image(_read_image(args.image, request))
    if args.mask:
        mask = _read_mask(args.mask, request)
    with tqdm(total=request.steps, desc="sampling") as bar:
        latent = pipeline.sample(request, init, mask, on_step=lambda done, total: bar.update())
    images = pipeline.decode(latent, args.tile and max(1, args.tile // SPATIAL_FACTOR))
    dit, text_encoder, vae = (Path(name).name for name in (args.dit, args.text_encoder, args.vae))
    loras = [(Path(path).name, strength) for path, strength in map(parse_lora_argument, args.lora)]
    graph, parameters = reproducing_graph(request, dit, text_encoder, vae, loras), parameters_text(request, dit)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    paths = []
    for index, image in enumerate(images):
        path = args.out if len(images) == 1 else args.out.with_stem(f"{args.out.stem}_{index:02d}")
        save_png(image, path, graph, parameters)
        paths.append(path)
    return paths


def read_size(text: str) -> tuple[int, int]:
    """`WIDTHxHEIGHT` -> (width, height)."""
    width, separator, height = text.lower().partition("x")
    if not (separator and width.isdecimal() and height.isdecimal()):
        raise InputError("The size cannot be read.", found=text, expected="WIDTHxHEIGHT, e.g. 1024x1024")
    return int(width), int(height)


def _request(args: argparse.Namespace) -> Request:
    width, height = read_size(args.size)
    if args.mask and not args.image:
        raise InputError("A mask needs a picture.", found="--mask without --image", fix="Add --image.")
    return Request(
        prompt=args.prompt, negative=args.negative, width=width, height=height, steps=args.steps,
        cfg=args.cfg, shift=args.shift, seed=args.seed, sampler=args.sampler, batch=args.batch, denoise=args.denoise,
    )  # fmt: skip


def _open(path: Path, mode: str, request: Request) -> Tensor:
    from PIL import Image, UnidentifiedImageError

    try:
        image = Image.open(path).convert(mode).resize((request.width, request.height), Image.Resampling.LANCZOS)
    except (OSError, UnidentifiedImageError) as error:
        raise InputError(
            "The picture cannot be read.", file=path, found=str(error), expected="a PNG or JPEG"
        ) from error
    return torch.from_numpy(np.asarray(image).copy()).float() / 255.0


def _read_image(path: Path, request: Request) -> Tensor:
    return _open(path, "RGB", request).unsqueeze(0)


def _read_mask(path: Path, request: Request) -> Tensor:
    mask = _open(path, "L", request)[None, None]
    return F.interpolate(mask, size=(request.height // SPATIAL_FACTOR, request.width // SPATIAL_FACTOR), mode="area")
