"""LoRA loading: any spelling of the names, with a report of what was applied and what was not."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import comfy.lora
import comfy.utils
import folder_paths
from comfy_api.latest import io
from torch import Tensor

from ..anima.checkpoint.header import read_header
from ..anima.checkpoint.kinds import identify
from ..anima.errors import InputError, shorten
from ..anima.lora.mapping import Module, SortedLora, check_lora, sort_lora
from ..anima.lora.names import dit_names, text_encoder_names
from .loaders import fingerprint, model_file

CATEGORY = "Anima/loaders"
DIT_ROOT = "diffusion_model."
TEXT_ROOT = "qwen3_06b.transformer.model."

_log = logging.getLogger("anima")


def _strength(id: str, what: str) -> io.Float.Input:
    return io.Float.Input(
        id, default=1.0, min=-100.0, max=100.0, step=0.01, tooltip=f"How strongly to change {what}; may be negative."
    )


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
                io.Model.Input("model", tooltip="The Anima model."),
                io.Combo.Input(
                    "lora_name", options=folder_paths.get_filename_list("loras"), tooltip="The file, from models/loras."
                ),
                _strength("strength_model", "the model and its LLM adapter"),
                _strength("strength_clip", "the text encoder"),
                io.Clip.Input("clip", optional=True, tooltip="The text encoder; only few LoRAs train it."),
            ],
            outputs=[
                io.Model.Output(display_name="model", tooltip="The model with the LoRA."),
                io.Clip.Output(display_name="clip", tooltip="The text encoder with the LoRA, if one is connected."),
                io.String.Output(display_name="report", tooltip="What was applied, by group, and what was not."),
            ],
        )

    @classmethod
    def fingerprint_inputs(cls, lora_name: str, **inputs: Any) -> Any:
        return fingerprint(("loras", lora_name)), inputs.get("strength_model"), inputs.get("strength_clip")

    @classmethod
    def execute(
        cls, model: Any, lora_name: str, strength_model: float, strength_clip: float, clip: Any = None
    ) -> io.NodeOutput:
        patched, patched_clip, report = apply_lora(
            model, clip, model_file("loras", lora_name), strength_model, strength_clip
        )
        _log.info("Anima: %s", report)
        return io.NodeOutput(patched, patched_clip, report)


def apply_lora(model: Any, clip: Any, path: str, strength_model: float, strength_clip: float) -> tuple[Any, Any, str]:
    """Clone model and clip with the LoRA's patches added.

    Args:
        model: MODEL.
        clip: CLIP or None.
        path: The LoRA file.

    Returns:
        model, clip and the report.

    Raises:
        AnimaError: not an Anima LoRA, damaged, or nothing of it fits.
    """
    kind = identify(read_header(path).shapes)
    tensors, metadata = comfy.utils.load_torch_file(path, safe_load=True, return_metadata=True)
    check_lora(tensors, path, kind.slug, kind.name)
    dit_keys = _weights(model.model.state_dict(), DIT_ROOT)
    text_keys = _weights(clip.cond_stage_model.state_dict(), TEXT_ROOT) if clip is not None else {}
    sorted_lora = sort_lora(tensors, dit_names(dit_keys), text_encoder_names(text_keys), metadata)

    problems: list[str] = [f"{name}: no such module" for name in sorted_lora.unknown]
    patches, wrong = _patches(sorted_lora.dit, dit_keys, DIT_ROOT)
    text_patches, wrong_text = _patches(sorted_lora.text, text_keys, TEXT_ROOT)
    problems += wrong + wrong_text
    if not patches and not text_patches:
        raise InputError(
            "Nothing of this LoRA fits the model.",
            file=path, found=shorten(problems), expected="modules of Anima with fitting shapes",
            fix="Check that the LoRA was trained on Anima; for another depth or width it cannot fit.",
        )  # fmt: skip
    model, clip = model.clone(), clip.clone() if clip is not None else None
    model.add_patches(patches, strength_model)
    if clip is not None:
        clip.add_patches(text_patches, strength_clip)
    return model, clip, _report(path, sorted_lora, problems)


def _weights(state_dict: dict[str, Tensor], root: str) -> dict[str, Tensor]:
    """Module path below `root` -> its weight."""
    return {
        key[len(root) : -len(".weight")]: tensor
        for key, tensor in state_dict.items()
        if key.startswith(root) and key.endswith(".weight")
    }


def _patches(modules: dict[str, Module], weights: dict[str, Tensor], root: str) -> tuple[dict[str, Any], list[str]]:
    """Host patches for the modules whose shapes fit, and a line for each that does not."""
    lora: dict[str, Tensor] = {}
    targets: dict[str, str] = {}
    problems: list[str] = []
    for path, module in modules.items():
        problem = _shape_problem(module, weights[path])
        if problem:
            problems.append(f"{path}: {problem}")
            continue
        lora |= {f"{root}{path}{suffix}": tensor for suffix, tensor in module.items()}
        targets[root + path] = f"{root}{path}.weight"
    return comfy.lora.load_lora(lora, targets, log_missing=False), problems


def _shape_problem(module: Module, weight: Tensor) -> str | None:
    up, down = module.get(".lora_up.weight"), module.get(".lora_down.weight")
    if (up is None) != (down is None):
        return "half of the LoRA pair is missing"
    if up is None or down is None or weight.ndim != 2:
        return None
    if up.shape[1] != down.shape[0]:
        return f"ranks differ: up {list(up.shape)}, down {list(down.shape)}"
    if (up.shape[0], down.shape[1]) != tuple(weight.shape):
        return f"shape {[up.shape[0], down.shape[1]]} does not fit the model's {list(weight.shape)}"
    return None


def _report(path: str, sorted_lora: SortedLora, problems: list[str]) -> str:
    groups = ", ".join(f"{name} {count}" for name, count in sorted_lora.groups().items() if count)
    lines = [f"{Path(path).name}: {sorted_lora.total} tensors ({groups or 'none known'})"]
    if problems:
        lines += [f"not applied ({len(problems)}):", *("  " + line for line in problems[:20])]
    return "\n".join(lines)
