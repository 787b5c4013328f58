"""Our side of the comparison: the standalone pipeline."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..convert import DTYPES
from ..pipeline import Pipeline, Request
from ..sampling import simple_schedule
from ..text.qwen3 import hidden_states
from ..vae import denormalize
from .recording import Job, OnStep, cos_and_sin


class OurSide:
    """A loaded `Pipeline`; see `recording.Side`."""

    def __init__(self, job: Job, pipeline: Pipeline | None = None):
        self.job = job
        self.pipeline = pipeline or Pipeline.load(
            job.dit, job.text_encoder, job.vae, adapter=job.adapter, dtype=DTYPES[job.dtype], device=job.device
        )

    def token_ids(self, prompt: str) -> tuple[list[int], list[int]]:
        tokens = self.pipeline.tokenizer(prompt)
        return tokens.qwen, tokens.t5

    def qwen_states(self, prompt: str) -> Tensor:
        return hidden_states(self.pipeline.text_encoder, self.pipeline.tokenizer(prompt).qwen)

    def context(self, prompt: str) -> Tensor:
        return self.pipeline.encode(prompt)

    def sigmas(self) -> Tensor:
        return simple_schedule(self.job.steps, self.job.shift)

    def module(self, name: str) -> nn.Module:
        return self.pipeline.transformer.get_submodule(name)

    def rope(self, tokens: tuple[int, int, int]) -> Tensor:
        return cos_and_sin(self.pipeline.transformer.rope(*tokens, device=self.pipeline.device))

    def velocity(self, x: Tensor, sigma: float, context: Tensor) -> Tensor:
        dtype = self.pipeline.dtype
        return self.pipeline.transformer(x.to(dtype), torch.tensor([sigma], device=x.device), context)

    def sample(self, noise: Tensor, on_step: OnStep) -> Tensor:
        job = self.job
        request = Request(
            job.prompt, job.negative, job.width, job.height, job.steps, job.cfg, job.shift, job.seed
        )  # fmt: skip

        def trace(stage: str, value: Tensor) -> None:
            kind, _, step = stage.partition(" at step ")
            if kind == "latent" and step:
                self._noisy = value
            elif kind == "prediction":
                on_step(int(step), self._noisy, value)

        return denormalize(self.pipeline.sample(request, trace=trace))

    def decode(self, latent: Tensor) -> Tensor:
        return self.pipeline.decode_denormalized(latent)
