"""What one side computes at every stage, in one order, and the file that keeps it."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..errors import CheckpointError
from ..sampling import seeded_noise
from ..trace import Keep, hook_output, stage_modules
from ..vae import LATENT_CHANNELS, SPATIAL_FACTOR

SIGMAS = (1.0, 0.75, 0.25, 0.02)
"""Where the velocity is compared."""
FORMAT = "anima verify 1"


@dataclass(frozen=True)
class Job:
    """What to run on both sides. Sizes in pixels."""

    dit: str
    text_encoder: str
    vae: str
    adapter: str | None = None
    prompt: str = "a red circle on a white background"
    negative: str = "blurry"
    width: int = 128
    height: int = 96
    steps: int = 4
    cfg: float = 4.0
    shift: float = 3.0
    seed: int = 1
    dtype: str = "fp32"
    device: str = "cpu"

    @property
    def latent_shape(self) -> tuple[int, int, int, int]:
        return (1, LATENT_CHANNELS, self.height // SPATIAL_FACTOR, self.width // SPATIAL_FACTOR)


OnStep = Callable[[int, Tensor, Tensor], None]


class Side(Protocol):
    """A port of Anima, ours or a reference. Latents are (1, 16, h, w), normalised."""

    def token_ids(self, prompt: str) -> tuple[list[int], list[int]]:
        """Qwen and T5 ids."""

    def qwen_states(self, prompt: str) -> Tensor:
        """(1, M, C)."""

    def context(self, prompt: str) -> Tensor:
        """The finished context (1, N, C)."""

    def sigmas(self) -> Tensor:
        """(steps + 1,)."""

    def module(self, name: str) -> nn.Module:
        """The module with this canonical name."""

    def rope(self, tokens: tuple[int, int, int]) -> Tensor:
        """cos and sin for a grid (t, h, w): (t*h*w, head_dim / 2, 2)."""

    def velocity(self, x: Tensor, sigma: float, context: Tensor) -> Tensor:
        """Output of the DiT, like x."""

    def sample(self, noise: Tensor, on_step: OnStep) -> Tensor:
        """Euler from noise to the denormalised latent that the VAE gets; on_step(i, noisy, clean prediction)."""

    def decode(self, latent: Tensor) -> Tensor:
        """Denormalised latent -> (1, H, W, 3) in [0, 1]."""


@dataclass
class Recording:
    """Stage -> tensor in the order they were computed, and where."""

    stages: dict[str, Tensor] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)

    def add(self, stage: str, value: Tensor) -> None:
        self.stages[stage] = value.detach().to("cpu", copy=True)

    def save(self, path: str | PathLike[str]) -> None:
        from safetensors.torch import save_file

        metadata = {"format": FORMAT, "stages": json.dumps(list(self.stages)), "info": json.dumps(self.info)}
        save_file({name: t.contiguous() for name, t in self.stages.items()}, path, metadata)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Recording:
        """Read what `save` wrote.

        Raises:
            CheckpointError: not such a file.
        """
        from safetensors import safe_open

        from ..checkpoint.header import read_header

        metadata = read_header(path).metadata
        if metadata.get("format") != FORMAT:
            raise CheckpointError(
                "This is not a saved report.", file=path, expected="a file written by anima verify --save"
            )
        with safe_open(path, framework="pt") as file:
            stages = {name: file.get_tensor(name) for name in json.loads(metadata["stages"])}
        return cls(stages, json.loads(metadata["info"]))


@torch.inference_mode()
def record(side: Side, job: Job, name: str) -> Recording:
    """Run every stage of a side.

    Args:
        name: Of the side, for the report.
    """
    out = Recording(info={
        "side": name, "job": asdict(job), "torch": torch.__version__, "machine": platform.machine(),
        "processor": torch.cuda.get_device_name() if job.device.startswith("cuda") else torch.backends.cpu.get_cpu_capability(),
    })  # fmt: skip
    qwen, t5 = side.token_ids(job.prompt)
    out.add("token ids (qwen3)", torch.tensor(qwen))
    out.add("token ids (t5)", torch.tensor(t5))
    out.add("qwen3 states", side.qwen_states(job.prompt))
    with _outputs(side, {"llm_adapter": "adapter rows"}, out.add):
        context = side.context(job.prompt)
    out.add("context", context)
    out.add("sigmas", side.sigmas())
    _record_dit(side, job, context, out)

    def on_step(index: int, noisy: Tensor, clean: Tensor) -> None:
        out.add(f"latent at step {index}", noisy)
        out.add(f"prediction at step {index}", clean)

    latent = side.sample(seeded_noise(job.latent_shape, job.seed), on_step)
    out.add("vae input", latent)
    out.add("image", side.decode(latent))
    return out


def _record_dit(side: Side, job: Job, context: Tensor, out: Recording) -> None:
    x = seeded_noise(job.latent_shape, job.seed + 1).to(job.device)
    seen: dict[str, Tensor] = {}
    modules = {
        m: stage for m, stage in stage_modules(_count_blocks(side)).items() if m not in ("llm_adapter", "final_layer")
    }

    def keep(stage: str, value: Tensor) -> None:
        seen[stage] = value.clone()

    def keep_input(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        keep("block 0 modulated input", args[0])

    hook = side.module("blocks.0.self_attn.q_proj").register_forward_pre_hook(keep_input)
    attention = _FirstAttention()
    with _outputs(side, modules, keep), attention:
        velocity = side.velocity(x, SIGMAS[0], context)
    hook.remove()
    tokens = {stage: value.reshape(1, -1, value.shape[-1]) for stage, value in seen.items()}
    out.add("patch embedding", tokens.pop("patch embedding"))
    out.add("timestep embedding", tokens.pop("timestep embedding"))
    out.add("rope table", side.rope((1, -(-x.shape[-2] // 2), -(-x.shape[-1] // 2))))
    out.add("block 0 modulated input", tokens.pop("block 0 modulated input"))
    out.add("block 0 rotated queries and keys", attention.queries_and_keys())
    for stage, value in tokens.items():
        out.add(stage, value)
    out.add(f"velocity at sigma {SIGMAS[0]}", velocity)
    for sigma in SIGMAS[1:]:
        out.add(f"velocity at sigma {sigma}", side.velocity(x, sigma, context))


def _count_blocks(side: Side) -> int:
    blocks = side.module("blocks")
    return len(blocks) if isinstance(blocks, nn.ModuleList) else 0


@contextmanager
def _outputs(side: Side, modules: dict[str, str], keep: Keep) -> Iterator[None]:
    """Give the outputs of modules (name -> stage) to `keep` while the context lasts."""
    hooks = [hook_output(side.module(name), stage, keep) for name, stage in modules.items()]
    try:
        yield
    finally:
        for handle in hooks:
            handle.remove()


class _FirstAttention(TorchFunctionMode):
    """Keeps the queries and keys of the first attention computed inside, after norm and RoPE."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: tuple[Tensor, Tensor] | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention and self.seen is None:
            self.seen = args[:2] if len(args) > 1 else (kwargs["query"], kwargs["key"])
        return func(*args, **(kwargs or {}))

    def queries_and_keys(self) -> Tensor:
        """(2, heads, tokens, head_dim)."""
        if self.seen is None:
            raise RuntimeError("no attention ran")
        return torch.cat(self.seen)


def cos_and_sin(table: Tensor) -> Tensor:
    """Rotation matrices (..., d/2, 2, 2) -> (tokens, d/2, 2)."""
    matrices = table.reshape(-1, *table.shape[-3:])
    return torch.stack([matrices[..., 0, 0], matrices[..., 1, 0]], dim=-1)


def save_job(job: Job, path: Path) -> None:
    path.write_text(json.dumps(asdict(job)), encoding="utf-8")


def load_job(path: Path) -> Job:
    return Job(**json.loads(path.read_text(encoding="utf-8")))
