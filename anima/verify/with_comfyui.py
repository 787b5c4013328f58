"""Native Anima of a ComfyUI as the reference, in a child process: `python -m anima.verify.with_comfyui JOB OUT`.

ComfyUI is imported in the child alone, and by name: importing this module needs no ComfyUI. Native detection knows only the released sizes and the adapter's dimensions are constants there, so the model is
built from ComfyUI's own classes with the dimensions of the file.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint.dit import plan_dit, settle
from ..checkpoint.parts import plan_text_encoder, plan_vae
from ..checkpoint.reading import read_tensors
from ..config import AnimaConfig
from ..convert import DTYPES
from ..errors import AnimaError, InputError
from .recording import Job, OnStep, Recording, cos_and_sin, load_job, record, save_job


def comfyui_folder() -> Path:
    """The ComfyUI to compare with, from COMFYUI_PATH.

    Raises:
        InputError: not set, or not a ComfyUI with Anima.
    """
    path = os.environ.get("COMFYUI_PATH", "")
    if not path or not (Path(path) / "comfy" / "ldm" / "anima").is_dir():
        raise InputError(
            "There is no ComfyUI to compare with.", found=f"COMFYUI_PATH={path!r}",
            expected="the folder of a ComfyUI that has native Anima", fix="Set COMFYUI_PATH, or use --reference diffusers.",
        )  # fmt: skip
    return Path(path)


def record_comfyui(job: Job) -> Recording:
    """Run the stages in a child process that has ComfyUI on its path."""
    comfyui = comfyui_folder()
    with tempfile.TemporaryDirectory() as folder:
        request, answer = Path(folder) / "job.json", Path(folder) / "recording.safetensors"
        save_job(job, request)
        package_root = str(Path(__file__).resolve().parents[2])
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(comfyui), package_root])}
        command = [sys.executable, "-P", "-m", __name__, str(request), str(answer)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)  # noqa: S603 - our own module
        if done.returncode:
            raise AnimaError("ComfyUI's side of the comparison failed.", file=comfyui, found=done.stderr[-2000:])
        return Recording.load(answer)


def native_config(config: AnimaConfig) -> dict[str, Any]:
    """The arguments native detection gives for a released Anima, with these dimensions."""
    return {
        "max_img_h": 240, "max_img_w": 240, "max_frames": 128, "in_channels": config.in_channels,
        "out_channels": config.out_channels, "patch_spatial": 2, "patch_temporal": 1, "concat_padding_mask": True,
        "model_channels": config.model_dim, "num_blocks": config.num_blocks, "num_heads": config.num_heads,
        "mlp_ratio": config.mlp_dim / config.model_dim, "crossattn_emb_channels": config.context_dim,
        "pos_emb_cls": "rope3d", "pos_emb_learnable": True, "pos_emb_interpolation": "crop", "min_fps": 1,
        "max_fps": 30, "use_adaln_lora": True, "adaln_lora_dim": config.adaln_lora_dim,
        "extra_per_block_abs_pos_emb": False, "rope_h_extrapolation_ratio": 4.0, "rope_w_extrapolation_ratio": 4.0,
        "rope_t_extrapolation_ratio": 1.0, "rope_enable_fps_modulation": False,
    }  # fmt: skip


class ComfySide:
    """See `recording.Side`."""

    def __init__(self, job: Job):
        self.job = job
        comfy_anima = importlib.import_module("comfy.text_encoders.anima")
        self.sd = importlib.import_module("comfy.sd")
        supported = importlib.import_module("comfy.supported_models_base")
        self.management = importlib.import_module("comfy.model_management")
        self.sampling = importlib.import_module("comfy.sample")

        source, dims = plan_text_encoder(job.text_encoder)
        dims.pop("head_dim")
        tensors = read_tensors(source)
        detected = importlib.import_module("comfy.text_encoders.hunyuan_video").llama_detect(tensors)
        self.clip = self.sd.CLIP(
            supported.ClipTarget(comfy_anima.AnimaTokenizer, comfy_anima.te(**detected)), state_dict=[tensors],
            parameters=sum(t.numel() for t in tensors.values()), model_options={"qwen3_06b_model_config": dims},
        )  # fmt: skip
        self.vae = self.sd.VAE(sd=read_tensors(plan_vae(job.vae)), dtype=DTYPES[job.dtype])
        self.patcher = self._load_dit()
        self.model = self.patcher.model

    def _load_dit(self) -> Any:
        plan = plan_dit(self.job.dit, self.job.adapter)
        dtype = DTYPES[self.job.dtype]
        tensors = {n: settle(t, dtype, True) for source in plan.sources for n, t in read_tensors(source).items()}
        native = importlib.import_module("comfy.ldm.anima.model")
        predict2 = importlib.import_module("comfy.ldm.cosmos.predict2")
        model_base = importlib.import_module("comfy.model_base")
        adapter: Any = plan.config.adapter

        def build(**kwargs: Any) -> Any:
            factory = {name: kwargs[name] for name in ("device", "dtype", "operations")}
            model = native.Anima.__new__(native.Anima)
            predict2.MiniTrainDIT.__init__(model, **kwargs)
            model.llm_adapter = native.LLMAdapter(
                source_dim=adapter.source_dim, target_dim=adapter.target_dim, model_dim=adapter.model_dim,
                num_layers=adapter.num_blocks, num_heads=adapter.num_heads, **factory,
            )  # fmt: skip
            return model

        config = importlib.import_module("comfy.supported_models").Anima(
            {"image_model": "anima", **native_config(plan.config)}
        )
        config.sampling_settings = {**config.sampling_settings, "shift": self.job.shift}
        config.set_inference_dtype(dtype, None)
        model = model_base.Anima.__new__(model_base.Anima)
        model_base.BaseModel.__init__(model, config, model_base.ModelType.FLOW, unet_model=build)
        model.load_model_weights(tensors)
        patcher = importlib.import_module("comfy.model_patcher").ModelPatcher(
            model, load_device=self.management.get_torch_device(), offload_device=self.management.unet_offload_device()
        )
        self.management.load_models_gpu([patcher], force_full_load=True)
        return patcher

    def token_ids(self, prompt: str) -> tuple[list[int], list[int]]:
        tokens = self.clip.tokenize(prompt)
        qwen, t5 = ([token[0] for token in tokens[name][0]] for name in ("qwen3_06b", "t5xxl"))
        return qwen, t5

    def _encoded(self, prompt: str) -> list[list[Any]]:
        return self.clip.encode_from_tokens_scheduled(self.clip.tokenize(prompt))

    def qwen_states(self, prompt: str) -> Tensor:
        return self._encoded(prompt)[0][0]

    def context(self, prompt: str) -> Tensor:
        ((states, extra),) = self._encoded(prompt)
        device = self.patcher.load_device
        conds = self.model.extra_conds(
            cross_attn=states, t5xxl_ids=extra["t5xxl_ids"], t5xxl_weights=extra["t5xxl_weights"], device=device,
            noise=torch.zeros(self.job.latent_shape).unsqueeze(2),
        )  # fmt: skip
        return conds["c_crossattn"].cond

    def sigmas(self) -> Tensor:
        samplers = importlib.import_module("comfy.samplers")
        return samplers.calculate_sigmas(self.model.model_sampling, "simple", self.job.steps)

    def module(self, name: str) -> nn.Module:
        return self.model.diffusion_model.get_submodule(name)

    def rope(self, tokens: tuple[int, int, int]) -> Tensor:
        like = torch.zeros(1, *tokens, self.model.diffusion_model.model_channels, device=self.patcher.load_device)
        return cos_and_sin(self.model.diffusion_model.pos_embedder(like, fps=None, device=like.device))

    def velocity(self, x: Tensor, sigma: float, context: Tensor) -> Tensor:
        x = x.unsqueeze(2).to(DTYPES[self.job.dtype])
        return self.model.diffusion_model(x, torch.tensor([sigma], device=x.device), context).squeeze(2)

    def sample(self, noise: Tensor, on_step: OnStep) -> Tensor:
        job = self.job

        def callback(step: int, clean: Tensor, noisy: Tensor, total: int) -> None:
            on_step(step, noisy.squeeze(2), clean.squeeze(2))

        return self.sampling.sample(
            self.patcher, noise.unsqueeze(2), job.steps, job.cfg, "euler", "simple", self._encoded(job.prompt),
            self._encoded(job.negative), torch.zeros_like(noise).unsqueeze(2), callback=callback, disable_pbar=True,
            seed=job.seed,
        ).squeeze(2)  # fmt: skip

    def decode(self, latent: Tensor) -> Tensor:
        image = self.vae.decode(latent.unsqueeze(2))
        return image.reshape(1, *image.shape[-3:])


def main() -> None:
    """Entry of the child process."""
    job, out = load_job(Path(sys.argv[1])), sys.argv[2]
    sys.argv = ["main.py", "--use-pytorch-cross-attention", *(["--cpu"] if job.device == "cpu" else [])]
    importlib.import_module("comfy.options").enable_args_parsing()
    importlib.import_module("comfy.cli_args")
    record(ComfySide(job), job, "comfyui").save(out)


if __name__ == "__main__":
    main()
