"""Recommended settings, for KSampler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from comfy_api.latest import io

from ..anima.presets import PRESETS, variant_of
from .lora import LORAS_ATTACHMENT
from .text import require_anima

AUTO = "auto"


class AnimaPreset(io.ComfyNode):
    """Settings by variant of the model."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="AnimaPreset",
            display_name="Anima Preset",
            category="Anima/sampling",
            description="The settings that the makers of Anima recommend for a variant, to connect to KSampler. auto tells "
            "the variant from the names of the model file and of the LoRAs loaded by this pack.",
            search_aliases=["anima", "preset", "recommended settings", "turbo"],
            inputs=[
                io.Model.Input("model", tooltip="The Anima model, with its LoRAs."),
                io.Combo.Input(
                    "variant", options=[AUTO, *PRESETS], default=AUTO,
                    tooltip="base and aesthetic: 30 to 50 steps with guidance. turbo: 8 to 12 steps without.",
                ),
            ],
            outputs=[
                io.Int.Output(display_name="steps", tooltip="For KSampler's steps."),
                io.Float.Output(display_name="cfg", tooltip="For KSampler's cfg."),
                # ComfyUI links a combo's output to no list of choices, which KSampler has
                io.AnyType.Output(display_name="sampler_name", tooltip="For KSampler's sampler_name."),
                io.AnyType.Output(display_name="scheduler", tooltip="For KSampler's scheduler."),
                io.Float.Output(display_name="shift", tooltip="For AnimaModelSampling; 3.0 is the model's own."),
                io.String.Output(display_name="negative", tooltip="A negative prompt; has no part at cfg 1."),
                io.String.Output(display_name="variant", tooltip="The variant these settings are for."),
            ],
        )  # fmt: skip

    @classmethod
    def execute(cls, model: Any, variant: str) -> io.NodeOutput:
        require_anima(model)
        if variant == AUTO:
            variant = variant_of(names_of(model))
        preset = PRESETS[variant]
        return io.NodeOutput(
            preset.steps, preset.cfg, preset.sampler, preset.scheduler, preset.shift, preset.negative, variant
        )


def names_of(model: Any) -> list[str]:
    """Names of the files a MODEL was made of: its own and its LoRAs'."""
    _, arguments = model.cached_patcher_init or (None, ("",))
    return [Path(str(arguments[0])).name, *(model.get_attachment(LORAS_ATTACHMENT) or ())]
