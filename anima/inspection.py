"""What a file is, told from its header without reading a tensor."""

from __future__ import annotations

from collections import Counter
from os import PathLike
from typing import Any

from .checkpoint.dit import differences, quantisation
from .checkpoint.header import Header
from .checkpoint.kinds import identify
from .checkpoint.layouts import (
    Layout,
    adapter_layout,
    dit_layout,
    find_vae_prefix,
    text_encoder_layout,
    vae_to_original,
)
from .checkpoint.sources import QUANTISATION_EXTRAS, Source, open_source
from .config import config_from_shapes
from .errors import CheckpointError
from .lora.names import split_suffix
from .text.qwen3 import qwen3_dimensions, qwen3_shapes
from .vae import vae_config_from_shapes


def inspect_file(path: str | PathLike[str]) -> dict[str, Any]:
    """Describe a file (or sharded index, or folder).

    Returns:
        A JSON-ready mapping: kind, layout, prefix, dtypes with counts, parameters, quantisation, config, missing,
        unexpected and misshapen tensors (for kinds whose architecture is known), metadata.

    Raises:
        AnimaError: the file is damaged or not a safetensors file.
    """
    header = open_source(path)
    kind = identify(header.shapes)
    out: dict[str, Any] = {
        "file": str(header.path),
        "bytes": header.file_size,
        "kind": kind.slug,
        "description": kind.name,
        "tensors": len(header.tensors),
        "parameters": sum(t.numel for name, t in header.tensors.items() if not QUANTISATION_EXTRAS.search(name)),
        "dtypes": dict(Counter(t.dtype for t in header.tensors.values()).most_common()),
        "metadata": header.metadata,
    }
    describe = {
        "anima_dit": _describe_dit, "anima_dit_diffusers": _describe_dit, "bundle": _describe_dit,
        "cosmos_predict2": _describe_dit, "anima_adapter": _describe_adapter, "qwen3": _describe_text_encoder,
        "wan_vae": _describe_vae,
    }.get(kind.slug)  # fmt: skip
    if describe is not None:
        out |= describe(header)
    elif kind.slug.startswith("lora"):
        suffixes = Counter((split_suffix(name) or ("", "unknown"))[1] for name in header.tensors)
        out["suffixes"] = dict(suffixes.most_common())
    return out


def _layout_fields(layout: Layout) -> dict[str, Any]:
    return {"layout": layout.name, "prefix": layout.prefix, "left_out": list(layout.dropped)}


def _describe_dit(header: Header) -> dict[str, Any]:
    layout = dit_layout(header.shapes)
    if layout is None:
        return {}
    shapes = {n: s for n, s in layout.canonical_shapes(header.shapes).items() if not QUANTISATION_EXTRAS.search(n)}
    extras = {n for n in layout.rename.values() if QUANTISATION_EXTRAS.search(n)}
    out = _layout_fields(layout) | {"quantisation": quantisation([Source(header, layout.rename)])}
    try:
        config = config_from_shapes(shapes)
    except CheckpointError as error:
        return out | {"problem": error.problem}
    diff = differences(shapes, config, extras)
    adapter = config.adapter
    return out | {
        "config": config.describe(),
        "adapter": None if adapter is None else f"{adapter.num_blocks} blocks, width {adapter.model_dim}",
        "missing": list(diff.missing),
        "unexpected": list(diff.unexpected),
        "misshapen": list(diff.misshapen),
    }


def _describe_adapter(header: Header) -> dict[str, Any]:
    layout = adapter_layout(header.shapes)
    return {} if layout is None else _layout_fields(layout)


def _describe_text_encoder(header: Header) -> dict[str, Any]:
    layout = text_encoder_layout(header.shapes)
    if layout is None:
        return {}
    shapes = layout.canonical_shapes(header.shapes)
    dims = qwen3_dimensions(shapes)
    expected = qwen3_shapes(dims)
    return _layout_fields(layout) | {
        "config": f"{dims['num_hidden_layers']} layers, width {dims['hidden_size']}",
        "missing": [name for name in expected if name not in shapes],
        "unexpected": [n for n in shapes if n not in expected and not QUANTISATION_EXTRAS.search(n)],
    }


def _describe_vae(header: Header) -> dict[str, Any]:
    prefix = find_vae_prefix(header.shapes) or ""
    shapes = {key.removeprefix(prefix): shape for key, shape in header.shapes.items()}
    diffusers = "decoder.conv_in.weight" in shapes
    if diffusers:
        shapes = {vae_to_original(name): shape for name, shape in shapes.items()}
    layout = "diffusers" if diffusers else "original"
    return {"layout": layout, "prefix": prefix, "config": f"width {vae_config_from_shapes(shapes).dim}"}
