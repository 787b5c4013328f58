"""Loader nodes: the three files of Anima, one by one or together."""

from __future__ import annotations

import os
from typing import Any

import folder_paths
import torch
from comfy_api.latest import io

from ..anima.checkpoint.dit import plan_dit
from ..anima.errors import CheckpointError
from .loading import load_planned_dit, load_text_encoder, load_vae

CATEGORY = "Anima/loaders"
IN_MODEL_FILE = "from the model file"
DTYPES: dict[str, torch.dtype | None] = {
    "default": None,
    "fp8_e4m3fn": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}

_DIT_TOOLTIP = "The Anima diffusion model, from models/diffusion_models."
_DTYPE_TOOLTIP = (
    "How the weights are kept in memory. default: what ComfyUI finds best for this machine. fp8 halves the memory of "
    "bf16 at some loss of detail; fp32 doubles it and is for checking."
)
_REPORT_TOOLTIP = "What was loaded: variant, depth, dtype, quantisation and the adapter's source."


def model_file(folder: str, name: str, also: str | None = None) -> str:
    """Full path of a model chosen in a node.

    Args:
        also: Another folder of models to look in.

    Raises:
        CheckpointError: no such file, or a name that leads out of the models folder.
    """
    path = folder_paths.get_full_path(folder, name) or (also and folder_paths.get_full_path(also, name))
    if not path:
        raise CheckpointError(
            f"The file is not in models/{folder}.",
            file=name,
            expected=f"one of the files in {', '.join(folder_paths.get_folder_paths(folder))}",
            fix="Put the file there and press R to refresh the list, or choose another.",
        )
    return path


def fingerprint(*files: tuple[str, str | None]) -> tuple[Any, ...]:
    """Identity of (folder, name) files by path, time and size, so that a replaced file is loaded again."""
    out: list[Any] = []
    for folder, name in files:
        path = folder_paths.get_full_path(folder, name) if name else None
        stat = os.stat(path) if path else None
        out.append((path, stat and (stat.st_mtime_ns, stat.st_size)))
    return tuple(out)


def model_names(folder: str) -> list[str]:
    """Names of a models folder's files, with those that ComfyUI does not list: GGUF and indices of sharded models."""
    names = list(folder_paths.get_filename_list(folder))
    for path in folder_paths.get_folder_paths(folder):
        if os.path.isdir(path):
            found, _ = folder_paths.recursive_search(path, excluded_dir_names=[".git"])
            names += [name for name in found if name.lower().endswith((".gguf", ".safetensors.index.json"))]
    return sorted(set(names))


def _choose(folder: str, id: str, tooltip: str, **kwargs: Any) -> io.Combo.Input:
    return io.Combo.Input(id, options=model_names(folder), tooltip=tooltip, **kwargs)


def _dtype_input() -> io.Combo.Input:
    return io.Combo.Input(
        "weight_dtype", options=list(DTYPES), default="default", tooltip=_DTYPE_TOOLTIP, advanced=True
    )


class AnimaUNetLoader(io.ComfyNode):
    """Loads the DiT."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        adapters = [IN_MODEL_FILE, *model_names("diffusion_models")]
        return io.Schema(
            node_id="AnimaUNetLoader",
            display_name="Load Anima Model",
            category=CATEGORY,
            description="Loads an Anima diffusion model. Depth, width and heads are read from the file, and a file "
            "that lacks a tensor or is another model is refused with the reason.",
            search_aliases=["anima", "unet", "diffusion model", "cosmos predict2", "dit loader"],
            inputs=[
                _choose("diffusion_models", "unet_name", _DIT_TOOLTIP),
                _dtype_input(),
                io.Combo.Input(
                    "llm_adapter", options=adapters, default=IN_MODEL_FILE, optional=True, advanced=True,
                    tooltip="Take the LLM adapter from another file, e.g. for a model saved without one.",
                ),
            ],
            outputs=[
                io.Model.Output(display_name="model", tooltip="The model, for KSampler and model nodes."),
                io.String.Output(display_name="report", tooltip=_REPORT_TOOLTIP),
            ],
        )  # fmt: skip

    @classmethod
    def fingerprint_inputs(cls, unet_name: str, weight_dtype: str, llm_adapter: str = IN_MODEL_FILE) -> Any:
        adapter = None if llm_adapter == IN_MODEL_FILE else llm_adapter
        return fingerprint(("diffusion_models", unet_name), ("diffusion_models", adapter)), weight_dtype

    @classmethod
    def execute(cls, unet_name: str, weight_dtype: str, llm_adapter: str = IN_MODEL_FILE) -> io.NodeOutput:
        path = model_file("diffusion_models", unet_name)
        adapter = None if llm_adapter == IN_MODEL_FILE else model_file("diffusion_models", llm_adapter)
        plan = plan_dit(path, adapter)
        return io.NodeOutput(load_planned_dit(plan, adapter, DTYPES[weight_dtype]), plan.report())


class AnimaTextEncoderLoader(io.ComfyNode):
    """Loads Qwen3-0.6B."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="AnimaTextEncoderLoader",
            display_name="Load Anima Text Encoder",
            category=CATEGORY,
            description="Loads the Qwen3 text encoder of Anima. The CLIP it gives works in every node that takes one.",
            search_aliases=["anima", "clip", "qwen3", "text encoder"],
            inputs=[_choose("text_encoders", "clip_name", "The Qwen3-0.6B file, from models/text_encoders.")],
            outputs=[io.Clip.Output(display_name="clip", tooltip="The text encoder, for prompt and LoRA nodes.")],
        )

    @classmethod
    def fingerprint_inputs(cls, clip_name: str) -> Any:
        return fingerprint(("text_encoders", clip_name))

    @classmethod
    def execute(cls, clip_name: str) -> io.NodeOutput:
        path = model_file("text_encoders", clip_name)
        return io.NodeOutput(load_text_encoder(path, folder_paths.get_folder_paths("embeddings")))


class AnimaVAELoader(io.ComfyNode):
    """Loads the Wan 2.1 / Qwen-Image VAE."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="AnimaVAELoader",
            display_name="Load Anima VAE",
            category=CATEGORY,
            description="Loads the Wan 2.1 / Qwen-Image VAE that Anima uses, and refuses any other with its name.",
            search_aliases=["anima", "vae", "wan vae", "qwen image vae"],
            inputs=[_choose("vae", "vae_name", "The Wan 2.1 / Qwen-Image VAE, from models/vae.")],
            outputs=[io.Vae.Output(display_name="vae", tooltip="The VAE, for WanVAEDecode and every VAE node.")],
        )

    @classmethod
    def fingerprint_inputs(cls, vae_name: str) -> Any:
        return fingerprint(("vae", vae_name))

    @classmethod
    def execute(cls, vae_name: str) -> io.NodeOutput:
        return io.NodeOutput(load_vae(model_file("vae", vae_name)))


class AnimaLoader(io.ComfyNode):
    """Loads all three files, or one bundle of all three."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        models = [*model_names("diffusion_models"), *model_names("checkpoints")]
        return io.Schema(
            node_id="AnimaLoader",
            display_name="Load Anima",
            category=CATEGORY,
            description="Loads the three files of Anima at once: diffusion model, text encoder and VAE. An all-in-one "
            "checkpoint has them all.",
            search_aliases=["anima", "checkpoint", "load anima", "all in one"],
            inputs=[
                io.Combo.Input(
                    "unet_name", options=models,
                    tooltip="The Anima diffusion model, from models/diffusion_models, or an all-in-one file, from "
                    "models/checkpoints.",
                ),
                _part_input("text_encoders", "clip_name", "The Qwen3-0.6B file, from models/text_encoders."),
                _part_input("vae", "vae_name", "The Wan 2.1 / Qwen-Image VAE, from models/vae."),
                _dtype_input(),
            ],
            outputs=[
                io.Model.Output(display_name="model", tooltip="The model, for KSampler and model nodes."),
                io.Clip.Output(display_name="clip", tooltip="The text encoder, for prompt and LoRA nodes."),
                io.Vae.Output(display_name="vae", tooltip="The VAE, for WanVAEDecode and every VAE node."),
                io.String.Output(display_name="report", tooltip=_REPORT_TOOLTIP),
            ],
        )  # fmt: skip

    @classmethod
    def fingerprint_inputs(cls, unet_name: str, clip_name: str, vae_name: str, weight_dtype: str) -> Any:
        files = (
            ("diffusion_models", unet_name),
            ("checkpoints", unet_name),
            ("text_encoders", clip_name),
            ("vae", vae_name),
        )
        return fingerprint(*files), weight_dtype

    @classmethod
    def execute(cls, unet_name: str, clip_name: str, vae_name: str, weight_dtype: str) -> io.NodeOutput:
        dit = model_file("diffusion_models", unet_name, also="checkpoints")
        text_encoder, vae = (
            dit if name == IN_MODEL_FILE else model_file(folder, name)
            for folder, name in (("text_encoders", clip_name), ("vae", vae_name))
        )
        plan = plan_dit(dit)
        clip = load_text_encoder(text_encoder, folder_paths.get_folder_paths("embeddings"))
        model = load_planned_dit(plan, dtype=DTYPES[weight_dtype])
        return io.NodeOutput(model, clip, load_vae(vae), plan.report())


def _part_input(folder: str, id: str, tooltip: str) -> io.Combo.Input:
    files = folder_paths.get_filename_list(folder)
    return io.Combo.Input(
        id,
        options=[*files, IN_MODEL_FILE],
        tooltip=f"{tooltip} '{IN_MODEL_FILE}' takes that of an all-in-one checkpoint.",
    )
