"""LoRA loading: any spelling of the names, with a report of what was applied and what was not."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import comfy.lora
import comfy.weight_adapter
import folder_paths
from comfy_api.latest import io
from torch import Tensor

from ..anima.lora.arithmetic import patched_weight
from ..anima.lora.blocks import Strengths, parse_blocks, parse_remap
from ..anima.lora.files import module_weights, parse_lora_argument, read_lora, report, sort_for
from ..anima.lora.mapping import Module
from .loaders import fingerprint, model_file

CATEGORY = "Anima/loaders"
DIT_ROOT = "diffusion_model."
TEXT_ROOT = "qwen3_06b.transformer.model."
LORAS_ATTACHMENT = "anima_loras"
"""Attachment of a MODEL: the names of the LoRA files on it."""

_log = logging.getLogger("anima")


def _strength(id: str, what: str, **kwargs: Any) -> io.Float.Input:
    tooltip = f"How strongly to change {what}; may be negative."
    return io.Float.Input(id, default=1.0, min=-100.0, max=100.0, step=0.01, tooltip=tooltip, **kwargs)


def _model_input() -> io.Model.Input:
    return io.Model.Input("model", tooltip="The Anima model.")


def _clip_input() -> io.Clip.Input:
    return io.Clip.Input("clip", optional=True, tooltip="The text encoder; only few LoRAs train it.")


def _file_input() -> io.Combo.Input:
    return io.Combo.Input(
        "lora_name", options=folder_paths.get_filename_list("loras"), tooltip="The file, from models/loras."
    )


def _outputs() -> list[Any]:
    return [
        io.Model.Output(display_name="model", tooltip="The model with the LoRA."),
        io.Clip.Output(display_name="clip", tooltip="The text encoder with the LoRA, if one is connected."),
        io.String.Output(display_name="report", tooltip="What was applied, by group, and what was not."),
    ]


class AnimaLoraLoader(io.ComfyNode):
    """Applies one LoRA file."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="AnimaLoraLoader",
            display_name="Load Anima LoRA",
            category=CATEGORY,
            description="Applies a LoRA of any trainer to the model (adapter included) and the text encoder, and "
            "reports what was applied and what was not, and why.",
            search_aliases=["anima", "lora", "lycoris", "load lora"],
            inputs=[
                _model_input(),
                _file_input(),
                _strength("strength_model", "the model and its LLM adapter"),
                _strength("strength_clip", "the text encoder"),
                _clip_input(),
            ],
            outputs=_outputs(),
        )

    @classmethod
    def fingerprint_inputs(cls, lora_name: str, **inputs: Any) -> Any:
        return fingerprint(("loras", lora_name)), inputs.get("strength_model"), inputs.get("strength_clip")

    @classmethod
    def execute(
        cls, model: Any, lora_name: str, strength_model: float, strength_clip: float, clip: Any = None
    ) -> io.NodeOutput:
        return io.NodeOutput(*apply_lora(model, clip, model_file("loras", lora_name), strength_model, strength_clip))


class AnimaLoraStack(io.ComfyNode):
    """Applies any number of LoRA files."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="AnimaLoraStack",
            display_name="Load Anima LoRAs",
            category=CATEGORY,
            description="Applies any number of LoRA files, one a line: name:strength, as in styles/ink.safetensors:0.8. "
            "Lines that start with # are left out.",
            search_aliases=["anima", "lora stack", "multiple loras"],
            inputs=[
                _model_input(),
                io.String.Input(
                    "loras", multiline=True, default="",
                    tooltip="A file of models/loras a line, with :strength (1 without). .safetensors may be left off.",
                ),
                _clip_input(),
            ],
            outputs=_outputs(),
        )  # fmt: skip

    @classmethod
    def fingerprint_inputs(cls, loras: str, **_: Any) -> Any:
        return fingerprint(*(("loras", name) for name, _ in _lines(loras))), loras

    @classmethod
    def execute(cls, model: Any, loras: str, clip: Any = None) -> io.NodeOutput:
        reports = []
        for name, strength in _lines(loras):
            model, clip, text = apply_lora(model, clip, model_file("loras", name), strength, strength)
            reports.append(text)
        return io.NodeOutput(model, clip, "\n".join(reports) or "no LoRA named")


def _lines(text: str) -> list[tuple[str, float]]:
    """File name and strength of each line that names one."""
    named = [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]
    out = []
    for name, strength in map(parse_lora_argument, named):
        out.append((name if "." in name.rsplit("/", 1)[-1] else name + ".safetensors", strength))
    return out


class AnimaLoraAdvanced(io.ComfyNode):
    """Applies one LoRA file with strengths by group and by block."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="AnimaLoraAdvanced",
            display_name="Load Anima LoRA (by parts)",
            category=CATEGORY,
            description="Applies a LoRA with its own strength for each kind of layer and for single blocks, or moves it "
            "to the blocks of a deeper model.",
            search_aliases=["anima", "lora block weight", "lora layers", "lora remap"],
            inputs=[
                _model_input(),
                _file_input(),
                _strength("strength", "everything; the strengths below multiply it"),
                _strength("self_attn", "self-attention, relative to strength"),
                _strength("cross_attn", "cross-attention (how the prompt acts), relative to strength"),
                _strength("mlp", "the MLPs, relative to strength"),
                _strength("modulation", "the timestep modulation, relative to strength"),
                _strength("adapter", "the LLM adapter, relative to strength"),
                _strength("text_encoder", "the text encoder, relative to strength"),
                io.String.Input(
                    "blocks", default="", optional=True,
                    tooltip="Strengths of single blocks of the DiT, relative to strength: 0-9:0.5, 12:1.2.",
                ),
                io.String.Input(
                    "remap", default="", optional=True, advanced=True,
                    tooltip="For a model of another depth: which blocks of the LoRA go to which blocks of the model, as in "
                    "0-13:0-13, 14-27:26-39. Empty leaves them where they are.",
                ),
                _clip_input(),
            ],
            outputs=_outputs(),
        )  # fmt: skip

    @classmethod
    def fingerprint_inputs(cls, lora_name: str, **inputs: Any) -> Any:
        return fingerprint(("loras", lora_name)), sorted(
            (k, str(v)) for k, v in inputs.items() if k not in ("model", "clip")
        )

    @classmethod
    def execute(
        cls, model: Any, lora_name: str, strength: float, text_encoder: float, blocks: str = "", remap: str = "",
        clip: Any = None, **groups: float,
    ) -> io.NodeOutput:  # fmt: skip
        parts = Strengths(groups, parse_blocks(blocks))
        path = model_file("loras", lora_name)
        return io.NodeOutput(
            *apply_lora(model, clip, path, strength, strength * text_encoder, parts, parse_remap(remap))
        )


def apply_lora(
    model: Any,
    clip: Any,
    path: str,
    strength_model: float,
    strength_clip: float,
    parts: Strengths | None = None,
    remap: Mapping[int, list[int]] | None = None,
) -> tuple[Any, Any, str]:
    """Clone model and clip with the LoRA's patches added.

    Args:
        model: MODEL.
        clip: CLIP or None.
        path: The LoRA file.
        parts: Multipliers by group and block.
        remap: The LoRA's block -> the model's blocks.

    Returns:
        model, clip and the report, which is logged too.

    Raises:
        AnimaError: not an Anima LoRA, damaged, or nothing of it fits.
    """
    lora = read_lora(path)
    dit = module_weights(model.model.state_dict(), DIT_ROOT)
    text = module_weights(clip.cond_stage_model.state_dict(), TEXT_ROOT) if clip is not None else {}
    applied, problems = sort_for(lora, dit, text, remap)
    model, clip = model.clone(), clip.clone() if clip is not None else None
    names = (*(model.get_attachment(LORAS_ATTACHMENT) or ()), Path(path).name)
    model.set_attachments(LORAS_ATTACHMENT, names)
    by_strength: dict[float, dict[str, Module]] = {}
    for module, tensors in applied.dit.items():
        by_strength.setdefault(strength_model * (parts.of(module) if parts else 1.0), {})[module] = tensors
    for strength, modules in by_strength.items():
        model.add_patches(_patches(modules, DIT_ROOT), strength)
    if clip is not None:
        clip.add_patches(_patches(applied.text, TEXT_ROOT), strength_clip)
    said = report(lora, applied, problems)
    _log.info("Anima: %s", said)
    return model, clip, said


def _patches(modules: Mapping[str, Module], root: str) -> dict[str, Any]:
    """Host patches: its own weight adapters, and ours for the kind it does not have."""
    lora: dict[str, Tensor] = {}
    out: dict[str, Any] = {}
    for path, module in modules.items():
        if ".on_input" in module:
            out[f"{root}{path}.weight"] = IA3Adapter(set(), [module])
        else:
            lora |= {f"{root}{path}{suffix}": tensor for suffix, tensor in module.items()}
    targets = {root + path: f"{root}{path}.weight" for path in modules}
    return out | comfy.lora.load_lora(lora, targets, log_missing=False)


class IA3Adapter(comfy.weight_adapter.WeightAdapterBase):
    """IA3 (Liu et al. 2022, arXiv:2205.05638) as LyCORIS saves it: rows or columns of a weight are scaled."""

    name = "ia3"

    def __init__(self, loaded_keys: set[str], weights: list[Any]):
        self.loaded_keys, self.weights = loaded_keys, weights

    def calculate_weight(
        self, weight: Tensor, key: str, strength: float, strength_model: float, offset: Any, function: Any,
        intermediate_dtype: Any = None, original_weight: Any = None,
    ) -> Tensor:  # fmt: skip
        """Called by the host to patch a weight; see `WeightAdapterBase`."""
        weight += function(patched_weight(weight, self.weights[0], strength) - weight)
        return weight
