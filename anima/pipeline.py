"""Text to image without ComfyUI: the same port, and with the same seed the same picture."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .checkpoint.dit import plan_dit, settle
from .checkpoint.parts import plan_text_encoder, plan_vae
from .checkpoint.reading import SCALED_FORMATS, comfy_formats, pack_scaled, read_tensors
from .errors import InputError, MissingPackageError
from .sampling import SAMPLERS, SHIFT, seeded_noise, simple_schedule, step_noise
from .text.qwen3 import hidden_states, load_qwen3
from .text.tokenizers import PromptTokenizer, find_tokenizers
from .trace import trace_if_asked
from .transformer import AnimaTransformer
from .vae import LATENT_CHANNELS, SPATIAL_FACTOR, WanImageVAE, denormalize, load_image_vae, normalize

FilePath = str | PathLike[str]
Trace = Callable[[str, Tensor], None]
"""Called with a stage's name and its tensor."""


def _no_trace(stage: str, value: Tensor) -> None:
    pass


@dataclass(frozen=True)
class Request:
    """What to make. Sizes are in pixels, multiples of 8."""

    prompt: str
    negative: str = ""
    width: int = 1024
    height: int = 1024
    steps: int = 30
    cfg: float = 4.0
    shift: float = SHIFT
    seed: int = 0
    sampler: str = "euler"
    batch: int = 1
    denoise: float = 1.0

    def check(self) -> None:
        """Raise InputError for values that cannot work."""
        problems = {
            f"size {self.width}x{self.height}": self.width < 16
            or self.height < 16
            or self.width % 8
            or self.height % 8,
            f"sampler {self.sampler}": self.sampler not in SAMPLERS,
            f"shift {self.shift}": self.shift <= 0,
            f"batch {self.batch}": self.batch < 1,
            f"seed {self.seed}": not 0 <= self.seed < 2**64,
        }
        found = [text for text, wrong in problems.items() if wrong]
        if found:
            raise InputError(
                "This picture cannot be made.",
                found=", ".join(found),
                expected=f"sides from 16 in multiples of 8, a sampler of {', '.join(SAMPLERS)}, shift above 0, "
                "batch from 1, seed from 0 to 2^64 - 1",
            )


def load_transformer(path: FilePath, adapter: FilePath | None, dtype: torch.dtype) -> AnimaTransformer:
    """Load a DiT with its adapter, strictly, in a dtype."""
    plan = plan_dit(path, adapter)
    tensors: dict[str, Tensor] = {}
    for source in plan.sources:
        tensors |= read_tensors(source)
    unknown = comfy_formats(tensors) - set(SCALED_FORMATS)
    if unknown:
        raise InputError(
            "This quantised format runs in ComfyUI only.",
            file=path, found=", ".join(unknown), expected=f"plain weights, GGUF, nf4, {', '.join(SCALED_FORMATS)}",
        )  # fmt: skip
    tensors = {name: settle(t, dtype, aligned=True) for name, t in pack_scaled(tensors).items()}
    model = AnimaTransformer(plan.config, device="meta", dtype=dtype).requires_grad_(False)
    model.load_state_dict(tensors, strict=True, assign=True)
    trace_if_asked(model, plan.config.num_blocks)
    return model.eval()


def load_text_encoder(path: FilePath, dtype: torch.dtype) -> nn.Module:
    """Load Qwen3, strictly."""
    source, _ = plan_text_encoder(path)
    return load_qwen3(read_tensors(source), dtype)


def load_vae(path: FilePath, dtype: torch.dtype) -> WanImageVAE:
    """Load a Wan 2.1 VAE as a VAE for single images, strictly."""
    return load_image_vae({name: t.to(dtype) for name, t in read_tensors(plan_vae(path)).items()})


def local_path(path: FilePath) -> FilePath:
    """A path as it is, or the local copy of a hub repo named `owner/name`, fetched when it is not there yet."""
    if Path(path).exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)) or str(path).endswith(".safetensors"):
        return path
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise MissingPackageError("huggingface_hub", "Loading a model by its hub repo id") from error
    try:
        return snapshot_download(str(path), allow_patterns=["*.safetensors", "*.json", "*.txt", "*.model"])
    except Exception as error:
        raise InputError(
            "There is no such file, and the hub repo cannot be fetched.",
            file=path, found=str(error)[:300], expected="a file, a folder, or a repo id owner/name",
        ) from error  # fmt: skip


def _together(contexts: list[Tensor], dim: int) -> Tensor:
    """Concatenate contexts (..., N, C), each with zero rows up to the longest."""
    longest = max(context.shape[-2] for context in contexts)
    return torch.cat([F.pad(context, (0, 0, 0, longest - context.shape[-2])) for context in contexts], dim)


@dataclass
class Pipeline:
    """The loaded parts. The text encoder computes in float32, as in ComfyUI.

    With `offload`, a part is on `device` only while it works.
    """

    tokenizer: PromptTokenizer
    text_encoder: nn.Module
    transformer: AnimaTransformer
    vae: WanImageVAE
    device: torch.device
    offload: bool = False

    @classmethod
    def load(
        cls,
        dit: FilePath,
        text_encoder: FilePath,
        vae: FilePath,
        *,
        adapter: FilePath | None = None,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        offload: bool = False,
    ) -> Pipeline:
        """Load the three files: single files, sharded indices, diffusers folders or their hub repo ids.

        A folder or a bundle may be named for several parts.
        """
        dit, text_encoder, vae = (local_path(path) for path in (dit, text_encoder, vae))
        pipeline = cls(
            tokenizer=find_tokenizers(
                [Path(text_encoder), Path(text_encoder).parent, Path(text_encoder).parent.parent]
            ),
            text_encoder=load_text_encoder(text_encoder, torch.float32),
            transformer=load_transformer(dit, adapter, dtype),
            vae=load_vae(vae, dtype),
            device=torch.device(device),
            offload=offload,
        )
        if not offload:
            for part in (pipeline.text_encoder, pipeline.transformer, pipeline.vae):
                part.to(pipeline.device)
        return pipeline

    @contextmanager
    def _working(self, part: nn.Module) -> Iterator[None]:
        if self.offload:
            part.to(self.device)
        yield
        if self.offload:
            part.to("cpu")

    @property
    def dtype(self) -> torch.dtype:
        return next(self.transformer.parameters()).dtype

    @torch.inference_mode()
    def encode(self, prompt: str, trace: Trace = _no_trace) -> Tensor:
        """Prompt -> finished context (1, max(N, 512), C)."""
        tokens = self.tokenizer(prompt)
        trace("token ids (qwen3)", torch.tensor(tokens.qwen))
        trace("token ids (t5)", torch.tensor(tokens.t5))
        with self._working(self.text_encoder):
            states = hidden_states(self.text_encoder, tokens.qwen)
        trace("qwen3 states", states)
        ids = torch.tensor([tokens.t5], device=self.device)
        weights = torch.tensor(tokens.t5_weights, device=self.device)[None, :, None]
        with self._working(self.transformer):
            context = self.transformer.preprocess_text_embeds(states.to(self.dtype), ids, weights.to(self.dtype))
        trace("context", context)
        return context

    @torch.inference_mode()
    def sample(
        self,
        request: Request | Sequence[Request],
        init: Tensor | None = None,
        mask: Tensor | None = None,
        on_step: Callable[[int, int], None] | None = None,
        trace: Trace = _no_trace,
    ) -> Tensor:
        """Make latents.

        Args:
            request: What to make; several requests that differ in prompt, negative and seed run as one batch.
            init: Normalised latents (1 or B, 16, h, w) to start from, for image-to-image and inpainting.
            mask: (1, 1, h, w), 1 where the picture may change.
            on_step: Called with the step just done and their number.

        Returns:
            Normalised latents (B, 16, h, w), float32.
        """
        requests = [request] if isinstance(request, Request) else request
        request = requests[0]
        request.check()
        context = _together([self.context(r, trace).repeat_interleave(r.batch, dim=1) for r in requests], dim=1)
        size = (LATENT_CHANNELS, request.height // SPATIAL_FACTOR, request.width // SPATIAL_FACTOR)
        sigmas = simple_schedule(request.steps, request.shift, request.denoise).to(self.device)
        trace("sigmas", sigmas)
        noises = [seeded_noise((r.batch, *size), r.seed).to(self.device) for r in requests]
        noise = torch.cat(noises)
        step_noises = [step_noise(like, r.seed) for like, r in zip(noises, requests, strict=True)]
        clean = torch.zeros_like(noise) if init is None else init.to(noise).expand_as(noise)
        x = sigmas[0] * noise + (1 - sigmas[0]) * clean

        def denoise(x: Tensor, sigma: Tensor) -> Tensor:
            if mask is not None:
                x = x * mask + (sigma * noise + (1 - sigma) * clean) * (1 - mask)
            out = self._guided(x, sigma, context, request.cfg)
            return out if mask is None else out * mask + clean * (1 - mask)

        def step(index: int, noisy: Tensor, prediction: Tensor) -> None:
            trace(f"latent at step {index}", noisy)
            trace(f"prediction at step {index}", prediction)
            if on_step is not None:
                on_step(index + 1, len(sigmas) - 1)

        mask = None if mask is None else mask.to(noise)
        with self._working(self.transformer):
            sampler = SAMPLERS[request.sampler]
            x = sampler(denoise, x, sigmas, lambda: torch.cat([draw() for draw in step_noises]), step, request.shift)
        trace("latent", x)
        return x

    def context(self, request: Request, trace: Trace = _no_trace) -> Tensor:
        """Negative and positive context, (1 or 2, 1, N, C); the negative first, as ComfyUI batches them."""
        positive = self.encode(request.prompt, trace)[None]
        return positive if request.cfg == 1.0 else _together([self.encode(request.negative)[None], positive], dim=0)

    def _guided(self, x: Tensor, sigma: Tensor, context: Tensor, cfg: float) -> Tensor:
        """Clean prediction under classifier-free guidance. x: (B, 16, h, w), context: (1 or 2, B, N, C)."""
        chunks = context.shape[0]
        batch = torch.cat([x] * chunks).to(self.dtype)
        velocity = self.transformer(batch, sigma.expand(batch.shape[0]), context.flatten(0, 1)).float()
        predictions = (torch.cat([x] * chunks) - velocity * sigma).chunk(chunks)
        if chunks == 1:
            return predictions[0]
        negative, positive = predictions
        return negative + (positive - negative) * cfg

    def decode(self, latent: Tensor, tile: int | None = None) -> Tensor:
        """Normalised latents (B, 16, h, w) -> pictures (B, 8h, 8w, 3) in [0, 1], float32 on the CPU, one at a time."""
        return self.decode_denormalized(denormalize(latent), tile)

    @torch.inference_mode()
    def decode_denormalized(self, latent: Tensor, tile: int | None = None) -> Tensor:
        """`decode` for latents on the VAE's own scale, as ComfyUI's LATENT holds them."""
        with self._working(self.vae):
            dtype = next(self.vae.parameters()).dtype
            image = torch.cat([self.vae.decode(one.to(dtype), tile) for one in latent.split(1)])
        return ((image.float() + 1.0) / 2.0).clamp(0, 1).movedim(1, -1).cpu()

    @torch.inference_mode()
    def encode_image(self, image: Tensor) -> Tensor:
        """Pictures (B, H, W, 3) in [0, 1] -> normalised latents (B, 16, H/8, W/8)."""
        with self._working(self.vae):
            dtype = next(self.vae.parameters()).dtype
            pixels = (image.movedim(-1, 1) * 2.0 - 1.0).to(device=self.device, dtype=dtype)
            return normalize(self.vae.encode(pixels).float())
