"""Our port as a ComfyUI model: the BaseModel that samplers call, and the config that builds it."""

from __future__ import annotations

import logging
from typing import Any

import comfy.conds
import comfy.hooks
import comfy.model_base
import comfy.patcher_extension
import comfy.supported_models_base
import torch
from comfy.ldm.modules.attention import optimized_attention
from torch import Tensor

from ..anima.config import AnimaConfig
from ..anima.errors import CheckpointError, InputError, shorten
from ..anima.packed import PackedTensor
from ..anima.sampling import SHIFT
from ..anima.trace import trace_if_asked
from ..anima.transformer import AnimaTransformer
from ..latent_formats import AnimaLatentFormat

FINISHED_CONTEXT = "anima_finished_context"
"""Key in a conditioning's dict that says: this is the adapter's output, not Qwen3 states.

Its value is what `adapter_patches` said of the model that finished it."""

_log = logging.getLogger("anima")


def host_attention(q: Tensor, k: Tensor, v: Tensor, heads: int, transformer_options: dict | None = None) -> Tensor:
    """ComfyUI's attention of choice, with its overrides, in the signature our port calls."""
    return optimized_attention(q, k, v, heads, skip_reshape=True, transformer_options=transformer_options)


class HostedTransformer(AnimaTransformer):
    """The port with ComfyUI's DIFFUSION_MODEL wrappers around its forward."""

    def forward(self, x, timesteps, context, fps=None, padding_mask=None, **kwargs):
        wrappers = comfy.patcher_extension.get_all_wrappers(
            comfy.patcher_extension.WrappersMP.DIFFUSION_MODEL, kwargs.get("transformer_options", {})
        )
        executor = comfy.patcher_extension.WrapperExecutor.new_class_executor(super().forward, self, wrappers)
        return executor.execute(x, timesteps, context, fps, padding_mask, **kwargs)


def build_transformer(*, config: AnimaConfig, dtype, device, operations, **_: Any) -> HostedTransformer:
    """Called by BaseModel with `unet_config`; what describes the model to other nodes is ignored."""
    return HostedTransformer(config, operations=operations, attention=host_attention, device=device, dtype=dtype)


def adapter_patches(patcher: Any) -> tuple[Any, ...]:
    """What a MODEL's LoRAs do to its LLM adapter: equal for two MODELs that finish a prompt alike."""
    return tuple(
        (key, tuple((patch[0], id(patch[1])) for patch in patches))
        for key, patches in sorted(patcher.patches.items())
        if key.startswith("diffusion_model.llm_adapter.")
    )


class AnimaModel(comfy.model_base.BaseModel):
    """Anima for ComfyUI's samplers: CONST rectified flow, and both kinds of conditioning."""

    def __init__(self, model_config: AnimaModelConfig, device: torch.device | None = None):
        super().__init__(model_config, comfy.model_base.ModelType.FLOW, device=device, unet_model=build_transformer)
        self._warned: set[str] = set()
        trace_if_asked(self.diffusion_model, model_config.unet_config["num_blocks"])

    def load_model_weights(self, sd: dict[str, Tensor], unet_prefix: str = "", assign: bool = True) -> AnimaModel:
        """Load canonical tensors, all of them: a missing or surplus one is an error, never a log line."""
        missing, unexpected = self.diffusion_model.load_state_dict(sd, strict=False, assign=assign)
        if missing or unexpected:
            raise CheckpointError(
                "The tensors do not fit the model.",
                found=f"missing: {shorten(missing) or 'none'}; unexpected: {shorten(unexpected) or 'none'}",
                expected="exactly the tensors of the architecture",
            )
        sd.clear()
        return self

    def state_dict_for_saving(self, unet_state_dict: dict[str, Tensor], *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """What ModelSave and CheckpointSave write: packed weights are written unpacked."""
        dense = {n: t.unpacked() if isinstance(t, PackedTensor) else t for n, t in unet_state_dict.items()}
        return super().state_dict_for_saving(dense, *args, **kwargs)

    def process_latent_in(self, latent: Tensor) -> Tensor:
        """Normalise a latent (B, 16, ...) that sampling starts from."""
        channels = self.latent_format.latent_channels
        if latent.shape[1] != channels:
            raise InputError(
                "The latent does not fit Anima.",
                found=f"{latent.shape[1]} channels",
                expected=f"{channels} channels (a Wan 2.1 / Qwen-Image latent)",
                fix="Encode the picture with the Anima VAE (WanVAEEncode), or start from AnimaEmptyLatent.",
            )
        return super().process_latent_in(latent)

    def extra_conds(self, **kwargs: Any) -> dict[str, Any]:
        """Finish the context here, before sampling, so that the adapter runs once per prompt and not per step."""
        out = super().extra_conds(**kwargs)
        context, ids = kwargs.get("cross_attn"), kwargs.get("t5xxl_ids")
        if context is None:
            return out
        if ids is None:
            self._warn_of_finished(context, kwargs)
            out["c_crossattn"] = comfy.conds.CONDRegular(context)
            return out
        device = kwargs["device"]
        context, ids, weights = batched_prompt(context, ids, kwargs.get("t5xxl_weights"))
        if torch.is_inference_mode_enabled() and not change_the_adapter(kwargs.get("hooks")):
            context = self.run_adapter(context, ids, weights, device)
        else:  # the adapter must run inside the forward pass, for gradients, or with the LoRA hooks of the step
            out["t5xxl_ids"] = comfy.conds.CONDRegular(ids)
            if weights is not None:
                out["t5xxl_weights"] = comfy.conds.CONDRegular(weights)
        out["c_crossattn"] = comfy.conds.CONDRegular(context)
        return out

    def run_adapter(self, states: Tensor, ids: Tensor, weights: Tensor | None, device: torch.device) -> Tensor:
        """Qwen3 states (B, M, C) and T5 ids (B, N) -> finished context (B, max(N, 512), C) on `device`."""
        dtype = self.get_dtype_inference()
        return self.diffusion_model.preprocess_text_embeds(
            states.to(device=device, dtype=dtype),
            ids.to(device),
            None if weights is None else weights.to(device=device, dtype=dtype),
        )

    def _warn_of_finished(self, context: Tensor, kwargs: dict[str, Any]) -> None:
        finished_with, patcher = kwargs.get(FINISHED_CONTEXT), getattr(self, "current_patcher", None)
        if finished_with is None:
            self._warn_once(
                f"a conditioning without T5 ids ({list(context.shape)}) that no Anima node finished. It is used as it is; "
                "if it comes from another model's text encoder, encode the prompt with AnimaTextEncoderLoader's CLIP "
                "instead."
            )
        elif patcher is not None and finished_with != adapter_patches(patcher):
            self._warn_once(
                "a conditioning finished by a model whose LLM adapter has other LoRAs than this one. The adapter's part of "
                "those LoRAs acts as it was at encoding; connect the model with its LoRAs to Qwen3AdapterTextEncode."
            )

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            _log.warning("Anima got %s", message)


def change_the_adapter(hooks: Any) -> bool:
    """Whether a conditioning's LoRA hooks change the adapter's weights while sampling."""
    weight_hooks = [] if hooks is None else hooks.get_type(comfy.hooks.EnumHookType.Weight)
    return any("llm_adapter" in key for hook in weight_hooks for key in hook.weights or ())


def batched_prompt(context: Tensor, ids: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Give T5 ids and weights the batch size of the Qwen3 states.

    Args:
        context: (B, M, C).
        ids: (N,), (1, N) or (B, N).
        weights: Like ids, or None.

    Returns:
        context (B, M, C), ids (B, N), weights (B, N, 1) or None.
    """
    ids = ids.reshape(-1, ids.shape[-1])
    if ids.shape[0] not in (1, context.shape[0]):
        raise InputError(
            "The conditioning's T5 ids and Qwen3 states belong to different batches.",
            found=f"{ids.shape[0]} rows of ids, {context.shape[0]} of states",
            expected="one row of ids, or as many as states",
        )
    ids = ids.expand(context.shape[0], -1)
    if weights is not None:
        weights = weights.reshape(-1, weights.shape[-1]).expand(context.shape[0], -1).unsqueeze(-1).to(context)
    return context, ids, weights


class AnimaModelConfig(comfy.supported_models_base.BASE):
    """What ComfyUI asks of a model's config. `unet_config` carries our `AnimaConfig` and a summary for others."""

    unet_config = {"image_model": "anima"}
    unet_extra_config: dict[str, Any] = {}
    sampling_settings = {"multiplier": 1.0, "shift": SHIFT}
    latent_format = AnimaLatentFormat
    memory_usage_factor = 1.0
    supported_inference_dtypes = [torch.bfloat16, torch.float16, torch.float32]

    def __init__(self, config: AnimaConfig):
        super().__init__({
            "image_model": "anima", "config": config, "in_channels": config.in_channels,
            "out_channels": config.out_channels, "model_channels": config.model_dim, "num_blocks": config.num_blocks,
            "num_heads": config.num_heads, "crossattn_emb_channels": config.context_dim,
        })  # fmt: skip

    def get_model(self, state_dict: dict[str, Tensor], prefix: str = "", device: Any = None) -> AnimaModel:
        return AnimaModel(self, device=device)

    def set_inference_dtype(self, dtype: torch.dtype, manual_cast_dtype: torch.dtype | None, **kwargs: Any) -> None:
        """Activations grow with the width; float16 adds a float32 residual stream."""
        self.memory_usage_factor = 0.95 * self.unet_config["model_channels"] / 2048
        if dtype is torch.float16:
            self.memory_usage_factor *= 1.4
        super().set_inference_dtype(dtype, manual_cast_dtype, **kwargs)
