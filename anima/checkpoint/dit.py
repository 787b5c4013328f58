"""Planning the load of a DiT: which file, which names, which dimensions, checked before a tensor is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from os import PathLike
from pathlib import Path

import torch

from ..config import AnimaConfig, Shape, config_from_shapes
from ..errors import CheckpointError, WrongKindError, check_tensors, shorten
from ..packed import PackedTensor
from ..transformer import AnimaTransformer
from .header import Header
from .kinds import Kind, identify
from .layouts import Layout, adapter_layout, dit_layout
from .sources import QUANTISATION_EXTRAS, Source, open_source

ALIGNMENT = 64
_NO_ADAPTER_FIX = (
    "Use a file of the Anima release, or name the file with the adapter in the loader's llm_adapter input."
)


@dataclass(frozen=True)
class DitPlan:
    """Everything known about a DiT before its tensors are read."""

    path: Path
    kind: Kind
    layout: str
    prefix: str
    config: AnimaConfig
    sources: tuple[Source, ...]
    adapter_source: str
    dtypes: Counter[str] = field(default_factory=Counter)
    dropped: tuple[str, ...] = ()
    quantisation: str = "none"

    @property
    def parameters(self) -> int:
        return sum(
            source.header.tensors[key].numel
            for source in self.sources
            for key, name in source.rename.items()
            if not QUANTISATION_EXTRAS.search(name)
        )

    def report(self) -> str:
        """What was loaded, in a few lines, for the node's STRING output and the log."""
        kinds = ", ".join(f"{name} x{count}" for name, count in self.dtypes.most_common())
        lines = [
            f"{self.path.name}: {self.kind.name}, {self.config.describe()}",
            f"layout: {self.layout}, prefix '{self.prefix}', {self.parameters / 1e9:.3f} B parameters",
            f"stored as: {kinds}; quantisation: {self.quantisation}",
            f"LLM adapter: {self.adapter_source}",
        ]
        if self.dropped:
            lines.append(f"left out, not weights: {shorten(self.dropped)}")
        return "\n".join(lines)


def plan_dit(path: str | PathLike[str], adapter: str | PathLike[str] | None = None) -> DitPlan:
    """Check a DiT file (or diffusers folder, or sharded index) and plan its load.

    Args:
        path: The file.
        adapter: A file whose LLM adapter is used instead of, or for want of, the DiT file's own.

    Raises:
        WrongKindError: the file is something else, which the message names.
        CheckpointError: damaged file, or tensors missing, surplus or of the wrong shape.
    """
    header = open_source(path, "transformer")
    kind = identify(header.shapes)
    layout = dit_layout(header.shapes)
    if layout is None or not kind.usable_as & {"dit", "dit_without_adapter"}:
        raise WrongKindError(
            "This is not an Anima DiT.",
            file=path,
            found=kind.name,
            expected="the Anima diffusion model (its tensors include blocks.N... and llm_adapter.blocks.N...)",
            fix="Choose the Anima file from models/diffusion_models.",
        )
    sources = [Source(header, layout.rename)]
    adapter_source = f"in the file ({path_name(path)})"
    own_adapter = any(name.startswith("llm_adapter.") for name in layout.rename.values())
    override = open_source(adapter, "text_conditioner") if adapter else _sibling_adapter(path, own_adapter)
    if override is not None:
        sources = [_without_adapter(sources[0]), _adapter_of(override)]
        adapter_source = f"from {path_name(override.path)}"
    elif not own_adapter:
        raise WrongKindError(
            "The DiT has no LLM adapter, so it cannot read Anima prompts.",
            file=path, found=kind.name, expected="tensors under llm_adapter.", fix=_NO_ADAPTER_FIX,
        )  # fmt: skip
    config, dtypes = _checked_config(sources, path)
    return DitPlan(
        path=Path(path), kind=kind, layout=layout.name, prefix=layout.prefix, config=config, sources=tuple(sources),
        adapter_source=adapter_source, dtypes=dtypes, dropped=layout.dropped, quantisation=quantisation(sources),
    )  # fmt: skip


def path_name(path: str | PathLike[str]) -> str:
    return Path(path).name


def _sibling_adapter(path: str | PathLike[str], own_adapter: bool) -> Header | None:
    """A diffusers folder keeps the adapter in `text_conditioner/` beside `transformer/`."""
    folder = Path(path)
    if own_adapter:
        return None
    folder = folder if folder.is_dir() else folder.parent.parent
    folder = folder.parent if folder.name == "transformer" else folder
    return open_source(folder, "text_conditioner") if (folder / "text_conditioner").is_dir() else None


def _without_adapter(source: Source) -> Source:
    return Source(source.header, {k: n for k, n in source.rename.items() if not n.startswith("llm_adapter.")})


def _adapter_of(header: Header) -> Source:
    layout: Layout | None = adapter_layout(header.shapes)
    if layout is None:
        raise WrongKindError(
            "The file named as LLM adapter has none.",
            file=header.path, found=identify(header.shapes).name,
            expected="an Anima DiT, or the adapter alone", fix=_NO_ADAPTER_FIX,
        )  # fmt: skip
    return Source(header, layout.rename)


def _checked_config(sources: list[Source], path: str | PathLike[str]) -> tuple[AnimaConfig, Counter[str]]:
    shapes: dict[str, Shape] = {}
    dtypes: Counter[str] = Counter()
    packed: set[str] = set()
    for source in sources:
        for key, name in source.rename.items():
            if QUANTISATION_EXTRAS.search(name):
                packed.add(name)
                continue
            info = source.header.tensors[key]
            shapes[name] = info.shape
            dtypes[info.dtype] += 1
    try:
        config = config_from_shapes(shapes)
    except CheckpointError as error:
        raise CheckpointError(
            error.problem, file=path, found=error.found, expected=error.expected, fix=error.fix
        ) from error
    check_architecture(shapes, config, path, packed)
    return config, dtypes


@lru_cache(maxsize=8)
def expected_shapes(config: AnimaConfig) -> dict[str, Shape]:
    """Name -> shape of every parameter of the architecture with these dimensions.

    One block of each kind is built, without memory, and repeated by name.
    """
    adapter = config.adapter
    single = replace(config, num_blocks=1, adapter=adapter and replace(adapter, num_blocks=1))
    counts = {"blocks.0.": config.num_blocks, "llm_adapter.blocks.0.": adapter.num_blocks if adapter else 0}
    out: dict[str, Shape] = {}
    for name, parameter in AnimaTransformer(single, device="meta").state_dict().items():
        block = next((block for block in counts if name.startswith(block)), "")
        for index in range(counts.get(block, 1)):
            out[name.replace(".0.", f".{index}.", 1) if block else name] = tuple(parameter.shape)
    return out


@dataclass(frozen=True)
class Differences:
    """How a file's tensors differ from the architecture."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    misshapen: tuple[str, ...]


def differences(shapes: Mapping[str, Shape], config: AnimaConfig, packed: set[str] | None = None) -> Differences:
    """Compare canonical shapes with the architecture.

    Args:
        packed: Quantisation extras of the file; a weight with such may be stored in another shape.
    """
    expected = expected_shapes(config)
    packed_modules = {QUANTISATION_EXTRAS.sub("", name) for name in packed or ()}

    def is_packed(name: str) -> bool:
        return name.removesuffix(".weight") in packed_modules

    return Differences(
        missing=tuple(name for name in expected if name not in shapes),
        unexpected=tuple(name for name in shapes if name not in expected),
        misshapen=tuple(
            f"{name} {list(shapes[name])} instead of {list(shape)}"
            for name, shape in expected.items()
            if name in shapes and shapes[name] != shape and not is_packed(name)
        ),
    )


def check_architecture(
    shapes: Mapping[str, Shape], config: AnimaConfig, path: str | PathLike[str], packed: set[str] | None = None
) -> None:
    """Raise CheckpointError unless the tensors are exactly those of the architecture."""
    diff = differences(shapes, config, packed)
    check_tensors(
        "The DiT file",
        {
            "lacks tensors": diff.missing,
            "has tensors of the wrong shape": diff.misshapen,
            "has tensors the architecture does not know": diff.unexpected,
        },
        file=path,
        expected=f"the {len(expected_shapes(config))} tensors of {config.describe()}",
        fix="Download the file again; if it is a merge or a conversion, repeat it.",
    )


def quantisation(sources: Sequence[Source]) -> str:
    """How the weights are quantised: `none`, `GGUF`, `raw fp8`, `scaled fp8`, `ComfyUI mixed precision`, `bitsandbytes nf4`."""
    names = [name for source in sources for name in source.rename.values()]
    if any(source.header.is_gguf for source in sources):
        return "GGUF"
    if any(name.endswith(".comfy_quant") for name in names) or any(
        "_quantization_metadata" in source.header.metadata for source in sources
    ):
        return "ComfyUI mixed precision"
    if any("quant_state.bitsandbytes" in name for name in names):
        return "bitsandbytes nf4"
    if any(name.endswith("scaled_fp8") for name in names) or any(name.endswith(".scale_weight") for name in names):
        return "scaled fp8"
    stored = {source.header.tensors[key].dtype for source in sources for key in source.rename}
    return "raw fp8" if any(dtype.startswith("F8_E") for dtype in stored) else "none"


def settle(tensor: torch.Tensor, dtype: torch.dtype | None, aligned: bool) -> torch.Tensor:
    """Make a tensor read from a file map ready to compute with.

    Args:
        dtype: Cast floating-point tensors to this; None keeps them.
        aligned: Copy a tensor that does not start on a 64-byte boundary. For computing on the CPU, whose kernels sum in
            another order on unaligned memory, so that the bits would depend on the length of the file's header.
    """
    if isinstance(tensor, PackedTensor):
        return tensor if dtype is None else tensor.with_dtype(dtype)
    if dtype is not None and tensor.is_floating_point():
        tensor = tensor.to(dtype)
    return tensor.clone() if aligned and tensor.data_ptr() % ALIGNMENT else tensor
