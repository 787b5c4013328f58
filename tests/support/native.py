"""Native Anima of the host ComfyUI on tiny dimensions: the reference, in ComfyUI's own classes.

Native detection knows only the released sizes, and its adapter's dimensions are constants, so the twin is built
from an explicit config, with an adapter of ComfyUI's own class in the dimensions of the file.
Import only where a `Host` exists.
"""

from __future__ import annotations

from typing import Any

import comfy.ldm.anima.model
import comfy.ldm.cosmos.predict2
import comfy.model_base
import comfy.model_management
import comfy.model_patcher
import comfy.supported_models
import comfy.utils
import folder_paths
import torch
from torch import Tensor

from anima.config import AnimaConfig
from anima.verify.with_comfyui import native_config


class NativeTransformer(comfy.ldm.anima.model.Anima):
    """ComfyUI's Anima with its adapter in other dimensions."""

    def __init__(self, adapter: Any, **kwargs: Any):
        comfy.ldm.cosmos.predict2.MiniTrainDIT.__init__(self, **kwargs)
        self.llm_adapter = comfy.ldm.anima.model.LLMAdapter(
            source_dim=adapter.source_dim, target_dim=adapter.target_dim, model_dim=adapter.model_dim,
            num_layers=adapter.num_blocks, num_heads=adapter.num_heads,
            **{name: kwargs[name] for name in ("device", "dtype", "operations")},
        )  # fmt: skip


class NativeModel(comfy.model_base.Anima):
    """ComfyUI's BaseModel for Anima around `NativeTransformer`."""

    def __init__(self, model_config: Any, device: Any = None):
        comfy.model_base.BaseModel.__init__(
            self, model_config, comfy.model_base.ModelType.FLOW, device=device, unet_model=NativeTransformer
        )


def load(sd: dict[str, Tensor], config: AnimaConfig, dtype: torch.dtype | None = None) -> Any:
    """A MODEL of native Anima on canonical tensors, loaded by the same steps as ComfyUI's UNETLoader."""
    model_config = comfy.supported_models.Anima({"image_model": "anima", **native_config(config)})
    model_config.unet_config["adapter"] = config.adapter
    management = comfy.model_management
    load_device = management.get_torch_device()
    if dtype is None:
        dtype = management.unet_dtype(
            model_params=comfy.utils.calculate_parameters(sd),
            supported_dtypes=model_config.supported_inference_dtypes,
            weight_dtype=comfy.utils.weight_dtype(sd),
        )
    cast = management.unet_manual_cast(dtype, load_device, model_config.supported_inference_dtypes)
    model_config.set_inference_dtype(dtype, cast)
    model = NativeModel(model_config)
    model.load_model_weights(dict(sd))
    return comfy.model_patcher.CoreModelPatcher(
        model, load_device=load_device, offload_device=management.unet_offload_device()
    )


class NativeLoader:
    """A V1 node standing in for UNETLoader on tiny files (`net.` prefix), for test graphs."""

    config: AnimaConfig
    RETURN_TYPES = ("MODEL",)
    FUNCTION = "run"
    CATEGORY = "test"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"unet_name": ("STRING", {}), "weight_dtype": ("STRING", {"default": "default"})}}

    def run(self, unet_name: str, weight_dtype: str) -> tuple[Any]:
        dtypes = {"fp8_e4m3fn": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2, "bf16": torch.bfloat16,
                  "fp16": torch.float16, "fp32": torch.float32}  # fmt: skip
        sd = comfy.utils.load_torch_file(folder_paths.get_full_path("diffusion_models", unet_name))
        prefixes = ("model.diffusion_model.", "net.")
        sd = {name.removeprefix(next((p for p in prefixes if name.startswith(p)), "")): t for name, t in sd.items()}
        return (load(sd, self.config, dtypes.get(weight_dtype)),)
