"""Fetching the published files from the Hugging Face hub into a ComfyUI models folder.

The hub's own library does the transfer (resuming, progress, mirrors by HF_ENDPOINT); here a file is checked
against the hub's SHA-256 before it takes its place.
"""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path

from .errors import AnimaError, CheckpointError, MissingPackageError

STAGING = ".anima-download"


@dataclass(frozen=True)
class Published:
    """A published file and its place below a models folder."""

    repo: str
    path: str
    folder: str
    licence: str

    @property
    def name(self) -> str:
        return self.path.rsplit("/", 1)[-1]


_ANIMA = "circlestone-labs/Anima"
_ANIMA_LICENCE = "CircleStone Labs licence, see the model page (the DiT derives from NVIDIA Cosmos-Predict2)"
FILES = {
    "dit": Published(_ANIMA, "split_files/diffusion_models/anima-base-v1.0.safetensors", "diffusion_models", _ANIMA_LICENCE),
    "text-encoder": Published(_ANIMA, "split_files/text_encoders/qwen_3_06b_base.safetensors", "text_encoders", "Apache-2.0 (Qwen3)"),
    "vae": Published(_ANIMA, "split_files/vae/qwen_image_vae.safetensors", "vae", "Apache-2.0 (Qwen-Image)"),
    "turbo-lora": Published("circlestone-labs/Anima-Official-LoRAs", "anima-turbo-lora-v0.2.safetensors", "loras", _ANIMA_LICENCE),
}  # fmt: skip


@dataclass(frozen=True)
class Remote:
    """Size in bytes and SHA-256 (hexadecimal) as the hub states them."""

    size: int
    sha256: str


def look_up(file: Published) -> Remote:
    """Ask the hub for a file's size and checksum.

    Raises:
        AnimaError: no connection, no such file, or no access.
    """
    hub = _hub()
    try:
        data = hub.get_hf_file_metadata(hub.hf_hub_url(file.repo, file.path))
    except Exception as error:
        raise _unreachable(file, error) from error
    if not data.etag or len(data.etag) != 64 or data.size is None:
        raise AnimaError("The hub names no SHA-256 for the file.", file=file.path, found=str(data.etag))
    return Remote(data.size, data.etag)


def fetch(file: Published, models: Path, force: bool = False) -> Path:
    """Download a file into `models`, resuming an earlier attempt, and check it.

    Returns:
        Its path. A file that is there already is kept (its size is compared) unless `force`.

    Raises:
        AnimaError: no connection, too little space.
        CheckpointError: the checksum is wrong; the file is not put in place.
    """
    remote = look_up(file)
    target = models / file.folder / file.name
    if target.exists() and not force and target.stat().st_size == remote.size:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(target.parent).free
    if free < remote.size:
        raise AnimaError(
            "There is too little space for the file.",
            file=target, found=f"{free / 1e9:.1f} GB free", expected=f"{remote.size / 1e9:.1f} GB", fix="Free some space.",
        )  # fmt: skip
    staging = models / STAGING
    try:
        arrived = Path(_hub().hf_hub_download(file.repo, file.path, local_dir=staging))
    except Exception as error:
        raise _unreachable(file, error) from error
    found = sha256(arrived)
    if found != remote.sha256:
        arrived.unlink()
        raise CheckpointError(
            "The downloaded file has the wrong checksum.",
            file=target, found=found, expected=remote.sha256, fix="Run the command again to download it anew.",
        )  # fmt: skip
    arrived.replace(target)
    return target


def sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hub():
    try:
        import huggingface_hub
    except ImportError as error:
        raise MissingPackageError("huggingface_hub", "Downloading the published files") from error
    return huggingface_hub


def _unreachable(file: Published, error: Exception) -> AnimaError:
    return AnimaError(
        "The file could not be downloaded.",
        file=f"{file.repo}/{file.path}",
        found=f"{type(error).__name__}: {str(error)[:300]}",
        fix="Check the connection and run the command again: it goes on where it stopped.",
    )
