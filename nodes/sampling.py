"""The latent to start from and the shift of the schedule."""

from __future__ import annotations

from typing import Any

import comfy.model_management
import comfy.model_sampling
import torch
from comfy_api.latest import io

import nodes as host_nodes

from ..anima.errors import InputError
from ..anima.sampling import SHIFT
from ..anima.vae import LATENT_CHANNELS, SPATIAL_FACTOR

CATEGORY = "Anima/sampling"


class AnimaModelSampling(io.ComfyNode):
    """Sets the shift, keeping the timestep multiplier at 1."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="AnimaModelSampling",
            display_name="Anima Model Sampling",
            category=CATEGORY,
            description="Sets the shift of Anima's flow schedule. Unlike ModelSamplingSD3 it keeps the timestep scale "
            "that Anima was trained with.",
            search_aliases=["anima", "shift", "model sampling", "flow shift"],
            inputs=[
                io.Model.Input("model", tooltip="An Anima model."),
                io.Float.Input(
                    "shift", default=SHIFT, min=0.01, max=100.0, step=0.01,
                    tooltip="Higher spends more steps on composition, lower on detail. Anima was trained for 3.0.",
                ),
            ],
            outputs=[io.Model.Output(display_name="model", tooltip="The model with the new schedule.")],
        )  # fmt: skip

    @classmethod
    def execute(cls, model: Any, shift: float) -> io.NodeOutput:
        if model.model.model_config.unet_config.get("image_model") != "anima":
            raise InputError(
                "This model is not Anima.",
                found=type(model.model).__name__,
                expected="the MODEL of AnimaUNetLoader or AnimaLoader",
                fix="Use the model-sampling node of that model.",
            )
        if shift <= 0:
            raise InputError(
                "The shift must be above 0.", found=str(shift), expected="3.0, or 1 to 10", fix="Raise it."
            )
        patched = model.clone()
        sampling = AnimaSampling(model.model.model_config)
        sampling.set_parameters(shift=shift, multiplier=1.0)
        patched.add_object_patch("model_sampling", sampling)
        return io.NodeOutput(patched)


class AnimaSampling(comfy.model_sampling.ModelSamplingDiscreteFlow, comfy.model_sampling.CONST):
    """Rectified flow with the timestep equal to sigma."""


class AnimaEmptyLatent(io.ComfyNode):
    """An empty latent in Anima's own shape."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        def side(id: str) -> io.Int.Input:
            return io.Int.Input(
                id, default=1024, min=16, max=host_nodes.MAX_RESOLUTION, step=8,
                tooltip=f"{id.capitalize()} of the picture in pixels. Anima is trained around 1024x1024 (0.5 to 2 megapixels).",
            )  # fmt: skip

        return io.Schema(
            node_id="AnimaEmptyLatent",
            display_name="Anima Empty Latent",
            category="Anima/latent",
            description="Makes the empty latent that sampling starts from, with Anima's 16 channels.",
            search_aliases=["anima", "empty latent", "resolution", "size"],
            inputs=[
                side("width"),
                side("height"),
                io.Int.Input("batch_size", default=1, min=1, max=4096, tooltip="How many pictures to make at once."),
            ],
            outputs=[io.Latent.Output(display_name="latent", tooltip="For KSampler's latent_image.")],
        )

    @classmethod
    def execute(cls, width: int, height: int, batch_size: int) -> io.NodeOutput:
        samples = torch.zeros(
            (batch_size, LATENT_CHANNELS, 1, height // SPATIAL_FACTOR, width // SPATIAL_FACTOR),
            device=comfy.model_management.intermediate_device(),
        )
        return io.NodeOutput({"samples": samples, "downscale_ratio_spacial": SPATIAL_FACTOR})
