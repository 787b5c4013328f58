"""Planning the load of the text encoder and the VAE, checked before a tensor is read."""

from __future__ import annotations

from os import PathLike

from ..errors import WrongKindError
from ..text.qwen3 import check_qwen3
from ..vae import check_vae
from .kinds import identify
from .layouts import find_vae_prefix, is_wan_vae, text_encoder_layout, vae_to_original
from .sources import QUANTISATION_EXTRAS, Source, open_source


def plan_text_encoder(path: str | PathLike[str]) -> tuple[Source, dict[str, int]]:
    """Check a Qwen3 file (or sharded index, or diffusers folder).

    Returns:
        What to read, and Qwen3's dimensions under Hugging Face's names.

    Raises:
        WrongKindError: the file is something else, which the message names.
        CheckpointError: damaged, or tensors missing, surplus or of the wrong shape.
    """
    header = open_source(path, "text_encoder")
    layout = text_encoder_layout(header.shapes)
    if layout is None:
        raise WrongKindError(
            "This is not the Anima text encoder.",
            file=path,
            found=identify(header.shapes).name,
            expected="Qwen3-0.6B (qwen_3_06b_base.safetensors)",
            fix="Choose the Qwen3 file from models/text_encoders.",
        )
    shapes = layout.canonical_shapes(header.shapes)
    plain = {name: shape for name, shape in shapes.items() if not QUANTISATION_EXTRAS.search(name)}
    return Source(header, layout.rename), check_qwen3(plain, path, packed=len(plain) < len(shapes))


def plan_vae(path: str | PathLike[str]) -> Source:
    """Check a Wan 2.1 / Qwen-Image VAE file; raises as `plan_text_encoder` does."""
    header = open_source(path, "vae")
    prefix = find_vae_prefix(header.shapes)
    if prefix is None or not is_wan_vae(header.shapes):
        raise WrongKindError(
            "This is not the VAE that Anima uses.",
            file=path,
            found=identify(header.shapes).name,
            expected="the Wan 2.1 / Qwen-Image VAE (qwen_image_vae.safetensors), 16 channels",
            fix="Choose the VAE file of the Anima release from models/vae.",
        )
    names = {key: key.removeprefix(prefix) for key in header.shapes if key.startswith(prefix)}
    if prefix + "decoder.conv_in.weight" in header.shapes:
        names = {key: vae_to_original(name) for key, name in names.items()}
    check_vae({name: header.shapes[key] for key, name in names.items()}, path)
    return Source(header, names)
