"""diffusers' Anima blocks, transformers' Qwen3 and tokenizers, as the reference.

Prompt weights are ComfyUI's language and unknown here: compare with plain prompts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..checkpoint.dit import plan_dit
from ..checkpoint.layouts import canonical_to_diffusers
from ..checkpoint.parts import plan_text_encoder, plan_vae
from ..checkpoint.reading import read_tensors
from ..convert import DTYPES, diffusers_config
from ..errors import InputError, MissingPackageError
from ..text.qwen3 import NORM_EPS, ROPE_THETA
from ..text.tokenizers import tokenizer_folders
from .recording import Job, OnStep

BLOCKS = "transformer_blocks"


class DiffusersSide:
    """See `recording.Side`."""

    def __init__(self, job: Job):
        try:
            import diffusers
            import transformers
        except ImportError as error:
            raise MissingPackageError(str(error.name), "The comparison with diffusers") from error
        self.job, self.device, self.dtype = job, torch.device(job.device), DTYPES[job.dtype]
        qwen_folder, t5_folder = tokenizer_folders([Path(job.text_encoder).parent])
        self.qwen_tokenizer = transformers.AutoTokenizer.from_pretrained(qwen_folder)
        self.t5_tokenizer = transformers.AutoTokenizer.from_pretrained(t5_folder)
        self.text_encoder = self._text_encoder(transformers).to(self.device)

        plan = plan_dit(job.dit, job.adapter)
        tensors = {n: t.to(self.dtype) for source in plan.sources for n, t in read_tensors(source).items()}
        renamed = {}
        for name, tensor in tensors.items():
            module, _, parameter = name.rpartition(".")
            renamed[f"{canonical_to_diffusers(module)}.{parameter}"] = tensor
        self.transformer = self._built(diffusers.CosmosTransformer3DModel, "transformer", "", renamed, plan.config)
        self.adapter = self._built(
            diffusers.AnimaTextConditioner, "text_conditioner", "text_conditioner.", renamed, plan.config
        )
        self.vae = self._vae(diffusers)
        self.scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=job.shift)

    def _text_encoder(self, transformers: Any) -> nn.Module:
        source, dims = plan_text_encoder(self.job.text_encoder)
        tensors = read_tensors(source)
        config = transformers.Qwen3Config(
            **dims, rms_norm_eps=NORM_EPS, rope_theta=ROPE_THETA, tie_word_embeddings=True
        )
        model = transformers.Qwen3Model(config)
        model.load_state_dict({k.removeprefix("model."): t.float() for k, t in tensors.items()}, strict=True)
        return model.float().eval()

    def _built(self, kind: Any, part: str, prefix: str, tensors: dict[str, Tensor], config: Any) -> Any:
        arguments = {k: v for k, v in diffusers_config(part, config).items() if not k.startswith("_")}
        model = kind(**arguments)
        own = {
            k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith("text_conditioner.") == bool(prefix)
        }
        model.load_state_dict(own, strict=True)
        return model.to(self.device, self.dtype).eval()

    def _vae(self, diffusers: Any) -> Any:
        from diffusers.loaders.single_file_utils import convert_wan_vae_to_diffusers

        tensors = read_tensors(plan_vae(self.job.vae))
        vae = diffusers.AutoencoderKLQwenImage(base_dim=tensors["encoder.conv1.weight"].shape[0])
        vae.load_state_dict(convert_wan_vae_to_diffusers(tensors), strict=True)
        return vae.to(self.device, self.dtype).eval()

    def token_ids(self, prompt: str) -> tuple[list[int], list[int]]:
        qwen = self.qwen_tokenizer(prompt)["input_ids"] or [self.qwen_tokenizer.pad_token_id]
        return qwen, self.t5_tokenizer(prompt)["input_ids"]

    def qwen_states(self, prompt: str) -> Tensor:
        ids = torch.tensor([self.token_ids(prompt)[0]], device=self.device)
        return self.text_encoder(input_ids=ids).last_hidden_state

    def context(self, prompt: str) -> Tensor:
        ids = torch.tensor([self.token_ids(prompt)[1]], device=self.device)
        return self.adapter(self.qwen_states(prompt).to(self.dtype), ids)

    def sigmas(self) -> Tensor:
        if 1000 % self.job.steps:
            raise InputError(
                "ComfyUI's and diffusers' schedules agree only where the steps divide 1000.",
                found=f"{self.job.steps} steps", fix="Choose 4, 5, 8, 10, 20, 25, ... steps.",
            )  # fmt: skip
        self.scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / self.job.steps, self.job.steps).tolist())
        return self.scheduler.sigmas

    def module(self, name: str) -> nn.Module:
        if name == "llm_adapter":
            return self.adapter.norm
        if name.startswith("blocks") and name.count(".") <= 1:
            return self.transformer.get_submodule(name.replace("blocks", BLOCKS))
        return self.transformer.get_submodule(canonical_to_diffusers(name) or name)

    def rope(self, tokens: tuple[int, int, int]) -> Tensor:
        t, h, w = tokens
        cos, sin = self.transformer.rope(torch.zeros(1, 1, t, 2 * h, 2 * w, device=self.device), fps=None)
        half = cos.shape[-1] // 2
        return torch.stack([cos[:, :half], sin[:, :half]], dim=-1)

    def velocity(self, x: Tensor, sigma: float, context: Tensor) -> Tensor:
        return self.transformer(
            hidden_states=x.unsqueeze(2).to(self.dtype), timestep=torch.tensor([sigma], device=x.device, dtype=self.dtype),
            encoder_hidden_states=context, padding_mask=x.new_zeros(1, 1, *x.shape[-2:]).to(self.dtype), return_dict=False,
        )[0].squeeze(2)  # fmt: skip

    def sample(self, noise: Tensor, on_step: OnStep) -> Tensor:
        x = noise.to(self.device)
        sigmas = self.sigmas()
        positive, negative = self.context(self.job.prompt), self.context(self.job.negative)
        for i, timestep in enumerate(self.scheduler.timesteps):
            sigma = float(sigmas[i])
            with_prompt, without = (self.velocity(x, sigma, c).float() for c in (positive, negative))
            velocity = without + self.job.cfg * (with_prompt - without)
            on_step(i, x, x - sigma * velocity)
            x = self.scheduler.step(velocity, timestep, x, return_dict=False)[0]
        mean = torch.tensor(self.vae.config.latents_mean, device=x.device).view(1, -1, 1, 1)
        std = torch.tensor(self.vae.config.latents_std, device=x.device).view(1, -1, 1, 1)
        return x * std + mean

    def decode(self, latent: Tensor) -> Tensor:
        image = self.vae.decode(latent.unsqueeze(2).to(self.dtype)).sample.squeeze(2)
        return ((image.float() + 1) / 2).clamp(0, 1).movedim(1, -1)
