"""Prompt encoding."""

from __future__ import annotations

from typing import Any

import comfy.model_management
import torch
from comfy_api.latest import io
from torch import Tensor

from ..anima.errors import InputError
from .model import FINISHED_CONTEXT, AnimaModel, adapter_patches, batched_prompt

CATEGORY = "Anima/conditioning"


class Qwen3AdapterTextEncode(io.ComfyNode):
    """Prompt -> conditioning, with or without running the adapter now."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="Qwen3AdapterTextEncode",
            display_name="Anima Prompt",
            category=CATEGORY,
            description="Encodes a prompt for Anima. Connect the model to finish the conditioning here: then averaging, "
            "concatenating and zeroing conditionings act on what the model really sees.",
            search_aliases=["anima", "prompt", "clip text encode", "text encode", "qwen3"],
            inputs=[
                io.String.Input(
                    "text", multiline=True, dynamic_prompts=True,
                    tooltip="The prompt: tags, sentences or both. (tag:1.2) weights it, \\( and \\) are literal parentheses.",
                ),
                io.Clip.Input("clip", tooltip="The Qwen3 text encoder, from AnimaTextEncoderLoader or CLIPLoader."),
                io.Model.Input(
                    "model", optional=True,
                    tooltip="The Anima model whose LLM adapter (with its LoRAs) finishes the conditioning. "
                    "Without it the adapter runs when sampling starts.",
                ),
                io.Boolean.Input(
                    "prompt_per_line", default=False, optional=True, advanced=True,
                    tooltip="Encode each line as a prompt of its own, as a batch. Needs the model connected.",
                ),
            ],
            outputs=[io.Conditioning.Output(display_name="conditioning", tooltip="For KSampler's positive or negative.")],
        )  # fmt: skip

    @classmethod
    def execute(cls, text: str, clip: Any, model: Any = None, prompt_per_line: bool = False) -> io.NodeOutput:
        if clip is None:
            raise InputError(
                "There is no text encoder.", found="nothing at 'clip'", fix="Connect AnimaTextEncoderLoader."
            )
        if not prompt_per_line:
            encoded = encode_prompt(clip, text)
            return io.NodeOutput(encoded if model is None else finish(model, encoded))
        if model is None:
            raise InputError(
                "Prompts of a batch differ in length, so their conditioning must be finished here.",
                found="prompt_per_line without a model",
                expected="the Anima model at 'model'",
                fix="Connect the model, or switch prompt_per_line off.",
            )
        lines = [line for line in text.splitlines() if line.strip()] or [""]
        return io.NodeOutput(stack_batch([finish(model, encode_prompt(clip, line)) for line in lines]))


def encode_prompt(clip: Any, text: str) -> list[list[Any]]:
    """Qwen3 states with T5 ids and weights riding along, as ComfyUI's own CLIPTextEncode gives them."""
    return clip.encode_from_tokens_scheduled(clip.tokenize(text))


def require_anima(model: Any) -> AnimaModel:
    """The AnimaModel inside a MODEL.

    Raises:
        InputError: the MODEL is something else, native Anima included.
    """
    if not isinstance(model.model, AnimaModel):
        raise InputError(
            "This needs an Anima model loaded by this pack.",
            found=type(model.model).__name__,
            expected="the MODEL of AnimaUNetLoader or AnimaLoader",
            fix="Load the model with AnimaUNetLoader.",
        )
    return model.model


def finish(model: Any, conditioning: list[list[Any]]) -> list[list[Any]]:
    """Run the model's LLM adapter, with its patches, on each entry; T5 ids are consumed."""
    anima = require_anima(model)
    comfy.model_management.load_models_gpu([model])
    device = model.load_device
    out = []
    for states, extra in conditioning:
        extra = dict(extra)
        ids, weights = extra.pop("t5xxl_ids", None), extra.pop("t5xxl_weights", None)
        if ids is None:
            raise InputError(
                "The text encoder is not Anima's.",
                found="a conditioning without T5 ids",
                expected="Qwen3-0.6B with the T5 tokenizer",
                fix="Load it with AnimaTextEncoderLoader.",
            )
        states, ids, weights = batched_prompt(states, ids, weights)
        with torch.inference_mode():
            context = anima.run_adapter(states, ids, weights, device)
        extra[FINISHED_CONTEXT] = adapter_patches(model)
        out.append([context.to(comfy.model_management.intermediate_device()), extra])
    return out


def stack_batch(prompts: list[list[list[Any]]]) -> list[list[Any]]:
    """One conditioning whose batch holds the prompts, zero-padded to the longest."""
    contexts: list[Tensor] = [entry[0][0] for entry in prompts]
    longest = max(context.shape[1] for context in contexts)
    padded = [torch.nn.functional.pad(c, (0, 0, 0, longest - c.shape[1])) for c in contexts]
    return [[torch.cat(padded), dict(prompts[0][0][1])]]
