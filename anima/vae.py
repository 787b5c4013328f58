"""The Wan 2.1 / Qwen-Image VAE for single images, in two dimensions, and the constants of its latent space.

With one frame there is no history: each causal 3-D convolution sees zeros in all but its last temporal
slice, so it equals the 2-D convolution with that slice. Submodule names are those of the original Wan
checkpoint; `image_state_dict` turns its tensors into the 2-D ones.

Shapes: images (B, 3, H, W) in [-1, 1]; latents (B, 16, H/8, W/8), not normalised (the range the VAE itself uses).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from os import PathLike

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import Shape
from .errors import CheckpointError, check_tensors

LATENT_CHANNELS = 16
SPATIAL_FACTOR = 8

LATENTS_MEAN = (
    -0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508,
    0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921,
)  # fmt: skip
LATENTS_STD = (
    2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743,
    3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160,
)  # fmt: skip

PREVIEW_FACTORS = (
    (-0.1299, -0.1692, 0.2932), (0.0671, 0.0406, 0.0442), (0.3568, 0.2548, 0.1747), (0.0372, 0.2344, 0.1420),
    (0.0313, 0.0189, -0.0328), (0.0296, -0.0956, -0.0665), (-0.3477, -0.4059, -0.2925), (0.0166, 0.1902, 0.1975),
    (-0.0412, 0.0267, -0.1364), (-0.1293, 0.0740, 0.1636), (0.0680, 0.3019, 0.1128), (0.0032, 0.0581, 0.0639),
    (-0.1251, 0.0927, 0.1699), (0.0060, -0.0633, 0.0005), (0.3477, 0.2275, 0.2950), (0.1984, 0.0913, 0.1861),
)  # fmt: skip
"""Normalised latent channels -> RGB, for previews."""
PREVIEW_BIAS = (-0.1835, -0.0868, -0.3360)
TAESD_DECODER = "lighttaew2_1"

DECODE_HALO = 13
"""Latent pixels of context the upsampling stages need: 12.25, from 19 3x3 convolutions at scales 1, 2, 4, 8."""
ENCODE_HALO = 96
"""Image pixels of context the downsampling stages need: at most 75, rounded up to whole latent pixels."""


def _statistics(like: Tensor) -> tuple[Tensor, Tensor]:
    shape = (1, LATENT_CHANNELS) + (1,) * (like.ndim - 2)
    return like.new_tensor(LATENTS_MEAN).view(shape), like.new_tensor(LATENTS_STD).view(shape)


def normalize(latent: Tensor) -> Tensor:
    """VAE latents (B, 16, ...) -> the unit-variance space the DiT works in."""
    mean, std = _statistics(latent)
    return (latent - mean) / std


def denormalize(latent: Tensor) -> Tensor:
    """The inverse of `normalize`."""
    mean, std = _statistics(latent)
    return latent * std + mean


@dataclass(frozen=True)
class VAEConfig:
    """`dim` is the channel count at full resolution (96 in the release)."""

    dim: int = 96
    multipliers: tuple[int, ...] = (1, 2, 4, 4)
    image_channels: int = 3


def vae_config_from_shapes(shapes: Mapping[str, Shape]) -> VAEConfig:
    """Infer the configuration from original Wan tensor names and shapes."""
    try:
        return VAEConfig(dim=shapes["decoder.head.0.gamma"][0], image_channels=shapes["encoder.conv1.weight"][1])
    except KeyError as error:
        raise CheckpointError(
            f"The VAE lacks the tensor {error}.", expected="a complete Wan 2.1 VAE", fix="Download the file again."
        ) from error


def check_vae(shapes: Mapping[str, Shape], path: str | PathLike[str]) -> VAEConfig:
    """Check original Wan tensors against the architecture and return its dimensions.

    Temporal convolutions, which a single image never reaches, may be present or not.

    Raises:
        CheckpointError: tensors are missing, surplus or of the wrong shape.
    """
    config = vae_config_from_shapes(shapes)
    with torch.device("meta"):
        expected = {name: tuple(t.shape) for name, t in WanImageVAE(config).state_dict().items()}

    def is_gain(shape: Shape) -> bool:
        return len(shape) == 4 and shape[1:] == (1, 1, 1)

    def flat(shape: Shape) -> Shape:
        """The shape the tensor has in two dimensions."""
        if is_gain(shape):
            return (shape[0], 1, 1)
        return shape[:2] + shape[3:] if len(shape) == 5 else shape

    problems = {
        "lacks tensors": [name for name in expected if name not in shapes],
        "has tensors of the wrong shape": [n for n, s in expected.items() if n in shapes and flat(shapes[n]) != s],
        "has tensors a Wan VAE does not have": [n for n in shapes if n not in expected and ".time_conv." not in n],
    }
    check_tensors(
        "The VAE file",
        problems,
        file=path,
        expected=f"the tensors of a Wan 2.1 VAE of width {config.dim}",
        fix="Download the VAE again.",
    )
    return config


class ChannelRMSNorm(nn.Module):
    """L2-normalises over channels, times sqrt(C) and a learned gain."""

    def __init__(self, dim: int):
        super().__init__()
        self.scale = dim**0.5
        self.gamma = nn.Parameter(torch.ones(dim, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=1) * self.scale * self.gamma


class ResidualBlock(nn.Module):
    """Two norm-SiLU-convolutions around a shortcut."""

    def __init__(self, in_dim: int, out_dim: int):
        super().__init__()
        self.residual = nn.Sequential(
            ChannelRMSNorm(in_dim), nn.SiLU(), nn.Conv2d(in_dim, out_dim, 3, padding=1),
            ChannelRMSNorm(out_dim), nn.SiLU(), nn.Identity(), nn.Conv2d(out_dim, out_dim, 3, padding=1),
        )  # fmt: skip
        self.shortcut = nn.Conv2d(in_dim, out_dim, 1) if in_dim != out_dim else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.residual(x) + self.shortcut(x)


class AttentionBlock(nn.Module):
    """Single-head self-attention over all pixels."""

    def __init__(self, dim: int):
        super().__init__()
        self.norm = ChannelRMSNorm(dim)
        self.to_qkv = nn.Conv2d(dim, dim * 3, 1)
        self.proj = nn.Conv2d(dim, dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        height = x.shape[2]
        q, k, v = self.to_qkv(self.norm(x)).flatten(2).transpose(1, 2).unsqueeze(1).chunk(3, dim=-1)
        out = F.scaled_dot_product_attention(q, k, v)
        return x + self.proj(out.squeeze(1).transpose(1, 2).unflatten(2, (height, -1)))


class Resample(nn.Module):
    """Nearest 2x upsampling with a halving convolution, or a strided convolution padded right and below."""

    def __init__(self, dim: int, up: bool):
        super().__init__()
        if up:
            self.resample = nn.Sequential(nn.Upsample(scale_factor=2.0), nn.Conv2d(dim, dim // 2, 3, padding=1))
        else:
            self.resample = nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(dim, dim, 3, stride=2))

    def forward(self, x: Tensor) -> Tensor:
        return self.resample(x)


def _middle(dim: int) -> nn.Sequential:
    return nn.Sequential(ResidualBlock(dim, dim), AttentionBlock(dim), ResidualBlock(dim, dim))


def _head(dim: int, out: int) -> nn.Sequential:
    return nn.Sequential(ChannelRMSNorm(dim), nn.SiLU(), nn.Conv2d(dim, out, 3, padding=1))


class Encoder(nn.Module):
    """(B, 3, H, W) -> (B, 32, H/8, W/8), mean and log-variance before `conv1` of the VAE."""

    def __init__(self, config: VAEConfig):
        super().__init__()
        dims = [config.dim * m for m in (1, *config.multipliers)]
        self.conv1 = nn.Conv2d(config.image_channels, dims[0], 3, padding=1)
        stages: list[nn.Module] = []
        for level, (in_dim, out_dim) in enumerate(itertools.pairwise(dims)):
            stages += [ResidualBlock(in_dim, out_dim), ResidualBlock(out_dim, out_dim)]
            if level < len(config.multipliers) - 1:
                stages.append(Resample(out_dim, up=False))
        self.downsamples = nn.Sequential(*stages)
        self.middle = _middle(dims[-1])
        self.head = _head(dims[-1], 2 * LATENT_CHANNELS)

    def local_stage(self, x: Tensor) -> Tensor:
        return self.downsamples(self.conv1(x))

    def global_stage(self, x: Tensor) -> Tensor:
        return self.head(self.middle(x))


class Decoder(nn.Module):
    """(B, 16, h, w) -> (B, 3, 8h, 8w)."""

    def __init__(self, config: VAEConfig):
        super().__init__()
        multipliers = config.multipliers[::-1]
        dims = [config.dim * m for m in (multipliers[0], *multipliers)]
        self.conv1 = nn.Conv2d(LATENT_CHANNELS, dims[0], 3, padding=1)
        self.middle = _middle(dims[0])
        stages: list[nn.Module] = []
        for level, (in_dim, out_dim) in enumerate(itertools.pairwise(dims)):
            in_dim = in_dim // 2 if level else in_dim  # the upsampling before halved the channels
            stages += [ResidualBlock(in_dim, out_dim), ResidualBlock(out_dim, out_dim), ResidualBlock(out_dim, out_dim)]
            if level < len(multipliers) - 1:
                stages.append(Resample(out_dim, up=True))
        self.upsamples = nn.Sequential(*stages)
        self.head = _head(dims[-1], config.image_channels)

    def global_stage(self, x: Tensor) -> Tensor:
        return self.middle(self.conv1(x))

    def local_stage(self, x: Tensor) -> Tensor:
        return self.head(self.upsamples(x))


class WanImageVAE(nn.Module):
    """Encoder and decoder for single images.

    Tiling is exact: the parts that look at the whole picture (the attention of the middle blocks, at 1/8
    of the size) run on all of it, and only the purely convolutional stages run tile by tile, each tile
    with as much surrounding context as those stages can see.
    """

    def __init__(self, config: VAEConfig):
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.conv1 = nn.Conv2d(2 * LATENT_CHANNELS, 2 * LATENT_CHANNELS, 1)
        self.conv2 = nn.Conv2d(LATENT_CHANNELS, LATENT_CHANNELS, 1)
        self.decoder = Decoder(config)

    def decode(self, latent: Tensor, tile: int | None = None, on_tile: Callable[[], None] | None = None) -> Tensor:
        """Args:
            latent: (B, 16, h, w).
            tile: Side of a tile in latent pixels; None decodes in one piece.
            on_tile: Called after each tile of each picture, for progress and interruption.

        Returns:
            (B, 3, 8h, 8w), about [-1, 1], not clamped.
        """
        hidden = self.decoder.global_stage(self.conv2(latent))
        return _tiled(self.decoder.local_stage, hidden, tile, DECODE_HALO, SPATIAL_FACTOR, 1, on_tile)

    def encode(self, image: Tensor, tile: int | None = None, on_tile: Callable[[], None] | None = None) -> Tensor:
        """Args:
            image: (B, 3, H, W) in [-1, 1], H and W multiples of 8.
            tile: Side of a tile in image pixels (a multiple of 8), or None.
            on_tile: As in `decode`.

        Returns:
            The mean of the posterior, (B, 16, H/8, W/8).
        """
        hidden = _tiled(self.encoder.local_stage, image, tile, ENCODE_HALO, 1, SPATIAL_FACTOR, on_tile)
        return self.conv1(self.encoder.global_stage(hidden)).chunk(2, dim=1)[0]


def _spans(size: int, tile: int, halo: int) -> Iterator[tuple[int, int, int, int]]:
    """(start, end) of each tile and (outer start, outer end) with its halo, clipped to the picture."""
    for start in range(0, size, tile):
        end = min(start + tile, size)
        yield start, end, max(0, start - halo), min(size, end + halo)


def _tiled(
    stage: Callable[[Tensor], Tensor], x: Tensor, tile: int | None, halo: int, up: int, down: int,
    on_tile: Callable[[], None] | None,
) -> Tensor:  # fmt: skip
    """Run a local stage on tiles with halos and assemble the centres; sizes scale by up / down."""
    height, width = x.shape[-2:]
    tile = max(height, width) if tile is None else tile
    out: Tensor | None = None
    for image in range(x.shape[0]):
        for y0, y1, top, bottom in _spans(height, tile, halo):
            for x0, x1, left, right in _spans(width, tile, halo):
                piece = stage(x[image : image + 1, :, top:bottom, left:right])
                if out is None:
                    out = piece.new_empty((x.shape[0], piece.shape[1], height * up // down, width * up // down))
                centre = piece[..., (y0 - top) * up // down :, (x0 - left) * up // down :]
                rows, columns = slice(y0 * up // down, y1 * up // down), slice(x0 * up // down, x1 * up // down)
                target = out[image : image + 1, :, rows, columns]
                target.copy_(centre[..., : target.shape[-2], : target.shape[-1]])
                if on_tile is not None:
                    on_tile()
    if out is None:
        raise ValueError("an empty batch has nothing to tile")
    return out


def image_state_dict(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of the original (video) Wan VAE -> those of `WanImageVAE`.

    Takes the last temporal slice of 3-D kernels, flattens the norms' gains, leaves out the temporal
    convolutions, which a single frame never reaches.
    """
    out = {}
    for key, tensor in state_dict.items():
        if ".time_conv." in key:
            continue
        if key.endswith(".gamma"):
            tensor = tensor.reshape(-1, 1, 1)
        elif tensor.ndim == 5:
            tensor = tensor[:, :, -1]
        out[key] = tensor
    return out


def load_image_vae(state_dict: Mapping[str, Tensor]) -> WanImageVAE:
    """Build a `WanImageVAE` on original Wan tensors, strictly; convolutions are laid out channels-last."""
    config = vae_config_from_shapes({key: tuple(tensor.shape) for key, tensor in state_dict.items()})
    with torch.device("meta"):
        vae = WanImageVAE(config).requires_grad_(False).eval()
    vae.load_state_dict(image_state_dict(state_dict), strict=True, assign=True)
    return vae.to(memory_format=torch.channels_last)
