"""Loading files into ComfyUI's own kinds of objects: ModelPatcher, CLIP and VAE."""

from __future__ import annotations

import json
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

from ..anima.checkpoint import reading
from ..anima.checkpoint.dit import DitPlan, plan_dit, settle
from ..anima.checkpoint.parts import plan_text_encoder, plan_vae
from ..anima.checkpoint.sources import Source
from ..anima.errors import CheckpointError
from ..anima.packed import PackedTensor
from .model import AnimaModelConfig

QWEN_HEAD_DIM = 128
"""ComfyUI's Qwen3-0.6B has this head dimension built in."""

_log = logging.getLogger("anima")


def read_tensors(source: Source) -> dict[str, Tensor]:
    """Read the tensors of a source the way ComfyUI reads files (memory-mapped); canonical name -> tensor."""
    return reading.read_tensors(source, lambda path, names: comfy.utils.load_torch_file(str(path)))


def quantisation_metadata(source: Source, prefix: str) -> dict[str, str]:
    """The file's metadata, with the layer names in ComfyUI's `_quantization_metadata` made canonical."""
    metadata = dict(source.header.metadata)
    if "_quantization_metadata" in metadata:
        layers = json.loads(metadata["_quantization_metadata"]).get("layers", {})
        renamed = {name.removeprefix(prefix): value for name, value in layers.items()}
        metadata["_quantization_metadata"] = json.dumps({"layers": renamed})
    return metadata


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
        sd |= read_tensors(source)
        metadata |= quantisation_metadata(source, plan.prefix)
    sd, _ = comfy.utils.convert_old_quants(sd, model_prefix="", metadata=metadata)

    management = comfy.model_management
    load_device = management.get_torch_device()
    offload_device = management.unet_offload_device()
    model_config = AnimaModelConfig(plan.config)
    model_config.quant_config = comfy.utils.detect_layer_quantization(sd, "")
    supported = model_config.supported_inference_dtypes
    if dtype is None:
        stored = None if model_config.quant_config else stored_dtype(sd)
        parameters = comfy.utils.calculate_parameters(sd)
        dtype = management.unet_dtype(model_params=parameters, supported_dtypes=supported, weight_dtype=stored)
    manual_cast = management.unet_manual_cast(None if model_config.quant_config else dtype, load_device, supported)
    model_config.set_inference_dtype(dtype, manual_cast)

    if model_config.quant_config:
        model = model_config.get_model(sd, device=offload_device)
    else:  # the file's own memory becomes the parameters: a second copy only where it is needed
        on_cpu = management.is_device_cpu(load_device)
        raised = manual_cast or torch.bfloat16
        sd = {n: settle(t, raised if needlessly_fp8(n, t) else dtype, aligned=on_cpu) for n, t in sd.items()}
        model = model_config.get_model(sd, device="meta")
        model.device = offload_device
    model.load_model_weights(sd, assign=True)
    patcher_class = comfy.model_patcher.ModelPatcher if disable_dynamic else comfy.model_patcher.CoreModelPatcher
    patcher = patcher_class(model, load_device=load_device, offload_device=offload_device)
    if not management.is_device_cpu(offload_device):
        model.to(offload_device)
    return patcher


def needlessly_fp8(name: str, tensor: Tensor) -> bool:
    """Whether a file quantised more than matrices: norms, biases and embeddings in fp8 cannot be computed with."""
    in_fp8 = tensor.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
    return in_fp8 and (tensor.ndim != 2 or name.endswith("embed.weight"))


def stored_dtype(sd: dict[str, Tensor]) -> torch.dtype | None:
    """The dtype ComfyUI should take the weights to be stored in: packed weights count as bfloat16."""
    return torch.bfloat16 if any(isinstance(t, PackedTensor) for t in sd.values()) else comfy.utils.weight_dtype(sd)


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
    sd, _ = comfy.utils.convert_old_quants(read_tensors(source), model_prefix="", metadata=dict(source.header.metadata))
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
    source = plan_vae(path)
    vae = comfy.sd.VAE(sd=read_tensors(source), metadata=dict(source.header.metadata))
    vae.throw_exception_if_invalid()
    _log.info("Anima: VAE %s", Path(path).name)
    return vae
