"""Loading files into ComfyUI's own kinds of objects: ModelPatcher, CLIP and VAE."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import comfy.model_management
import comfy.model_patcher
import comfy.sd
import comfy.supported_models_base
import comfy.text_encoders.anima
import comfy.text_encoders.hunyuan_video
import comfy.utils
import torch
from torch import Tensor

from ..anima.checkpoint.dit import DitPlan, plan_dit, settle
from ..anima.checkpoint.parts import plan_text_encoder, plan_vae
from ..anima.checkpoint.sources import Source, tensor_files
from ..anima.errors import CheckpointError
from .model import AnimaModelConfig

QWEN_HEAD_DIM = 128
"""ComfyUI's Qwen3-0.6B has this head dimension built in."""

_log = logging.getLogger("anima")


def read_tensors(source: Source) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read the tensors of a source the way ComfyUI reads files (memory-mapped).

    Returns:
        Canonical name -> tensor, and the metadata of the file.
    """
    tensors: dict[str, Tensor] = {}
    metadata: dict[str, str] = {}
    for file, names in tensor_files(source.header):
        loaded, file_metadata = comfy.utils.load_torch_file(str(file), return_metadata=True)
        tensors |= {source.rename[name]: loaded[name] for name in names if name in source.rename}
        metadata |= file_metadata or {}
    return tensors, metadata


def load_dit(
    path: str, adapter: str | None = None, dtype: torch.dtype | None = None, disable_dynamic: bool = False
) -> comfy.model_patcher.ModelPatcher:
    """Load a DiT as ComfyUI loads its own models: dtype choice, manual cast, offload device, dynamic patcher.

    Args:
        path: File, sharded index or diffusers folder.
        adapter: File whose LLM adapter replaces the DiT's own.
        dtype: Storage dtype of the weights; None lets ComfyUI choose for the machine and its start flags.
        disable_dynamic: Ask for a patcher without dynamic VRAM, as ComfyUI does when it needs a delegate.
    """
    return load_planned_dit(plan_dit(path, adapter), adapter, dtype, disable_dynamic)


def load_planned_dit(
    plan: DitPlan, adapter: str | None = None, dtype: torch.dtype | None = None, disable_dynamic: bool = False
) -> comfy.model_patcher.ModelPatcher:
    """`load_dit` for a file that was checked already, as the loader nodes do for their report."""
    patcher = _build_patcher(plan, dtype, disable_dynamic)
    patcher.cached_patcher_init = (load_dit, (str(plan.path), adapter, dtype))
    _log.info("Anima: %s", plan.report())
    return patcher


def _build_patcher(plan: DitPlan, dtype: torch.dtype | None, disable_dynamic: bool) -> Any:
    sd: dict[str, Tensor] = {}
    metadata: dict[str, str] = {}
    for source in plan.sources:
        tensors, file_metadata = read_tensors(source)
        sd |= tensors
        metadata |= file_metadata
    sd, _ = comfy.utils.convert_old_quants(sd, model_prefix="", metadata=metadata)

    management = comfy.model_management
    load_device = management.get_torch_device()
    offload_device = management.unet_offload_device()
    model_config = AnimaModelConfig(plan.config)
    model_config.quant_config = comfy.utils.detect_layer_quantization(sd, "")
    supported = model_config.supported_inference_dtypes
    if dtype is None:
        stored = None if model_config.quant_config else comfy.utils.weight_dtype(sd)
        parameters = comfy.utils.calculate_parameters(sd)
        dtype = management.unet_dtype(model_params=parameters, supported_dtypes=supported, weight_dtype=stored)
    manual_cast = management.unet_manual_cast(None if model_config.quant_config else dtype, load_device, supported)
    model_config.set_inference_dtype(dtype, manual_cast)

    if model_config.quant_config:
        model = model_config.get_model(sd, device=offload_device)
    else:  # the file's own memory becomes the parameters: a second copy only where it is needed
        on_cpu = management.is_device_cpu(load_device)
        sd = {name: settle(tensor, dtype, aligned=on_cpu) for name, tensor in sd.items()}
        model = model_config.get_model(sd, device="meta")
        model.device = offload_device
    model.load_model_weights(sd, assign=True)
    patcher_class = comfy.model_patcher.ModelPatcher if disable_dynamic else comfy.model_patcher.CoreModelPatcher
    patcher = patcher_class(model, load_device=load_device, offload_device=offload_device)
    if not management.is_device_cpu(offload_device):
        model.to(offload_device)
    return patcher


class AnimaTokenizer(comfy.text_encoders.anima.AnimaTokenizer):
    """ComfyUI's tokenizer pair, with textual inversions kept out of the T5 stream, which has only ids."""

    def tokenize_with_weights(self, text: str, return_word_ids: bool = False, **kwargs: Any) -> dict[str, Any]:
        out = super().tokenize_with_weights(text, return_word_ids, **kwargs)
        out["t5xxl"] = [[token for token in chunk if not torch.is_tensor(token[0])] for chunk in out["t5xxl"]]
        return out


def load_text_encoder(
    path: str, embedding_directory: list[str] | None = None, disable_dynamic: bool = False
) -> comfy.sd.CLIP:
    """Load Qwen3 of any size as a ComfyUI CLIP object with Anima's two token streams."""
    source, dims = plan_text_encoder(path)
    if dims.pop("head_dim") != QWEN_HEAD_DIM:
        raise CheckpointError(
            "The text encoder's heads do not fit ComfyUI's Qwen3.",
            file=path,
            expected=f"head dimension {QWEN_HEAD_DIM}",
        )
    sd, metadata = read_tensors(source)
    sd, _ = comfy.utils.convert_old_quants(sd, model_prefix="", metadata=metadata)
    detected = comfy.text_encoders.hunyuan_video.llama_detect(sd)
    clip = comfy.sd.CLIP(
        comfy.supported_models_base.ClipTarget(AnimaTokenizer, comfy.text_encoders.anima.te(**detected)),
        embedding_directory=embedding_directory,
        parameters=comfy.utils.calculate_parameters(sd),
        state_dict=[sd],
        model_options={"qwen3_06b_model_config": dims},
        disable_dynamic=disable_dynamic,
    )
    clip.patcher.cached_patcher_init = (load_text_encoder_patcher, (path, embedding_directory))
    _log.info("Anima: text encoder %s, %d layers, width %d", path, dims["num_hidden_layers"], dims["hidden_size"])
    return clip


def load_text_encoder_patcher(*args: Any, **kwargs: Any) -> comfy.model_patcher.ModelPatcher:
    """The patcher alone, for ComfyUI's `cached_patcher_init`."""
    return load_text_encoder(*args, **kwargs).patcher


def load_vae(path: str) -> comfy.sd.VAE:
    """Load a Wan 2.1 / Qwen-Image VAE as a ComfyUI VAE object."""
    sd, metadata = read_tensors(plan_vae(path))
    vae = comfy.sd.VAE(sd=sd, metadata=metadata)
    vae.throw_exception_if_invalid()
    _log.info("Anima: VAE %s", Path(path).name)
    return vae
