"""Merging two Anima models."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..anima.lora.blocks import GROUPS, Strengths, parse_blocks
from .lora import DIT_ROOT
from .text import require_anima

CATEGORY = "Anima/model"


def _slider(group: str, what: str) -> io.Float.Input:
    return io.Float.Input(
        group, default=1.0, min=0.0, max=10.0, step=0.01, advanced=True,
        tooltip=f"Share of model2 in {what}, relative to ratio.",
    )  # fmt: skip


class AnimaModelMerge(io.ComfyNode):
    """Weighted sum of two models, by kind of layer and by block."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="AnimaModelMerge",
            display_name="Merge Anima Models",
            category=CATEGORY,
            description="Mixes two Anima models of the same depth and width, with shares by kind of layer, for the LLM "
            "adapter and for single blocks.",
            search_aliases=["anima", "model merge", "merge blocks", "checkpoint merge"],
            inputs=[
                io.Model.Input("model1", tooltip="The model that ratio 0 leaves as it is."),
                io.Model.Input("model2", tooltip="The model that ratio 1 puts in its place."),
                io.Float.Input(
                    "ratio", default=0.5, min=0.0, max=1.0, step=0.01, tooltip="Share of model2; the others multiply it."
                ),
                _slider("self_attn", "self-attention"),
                _slider("cross_attn", "cross-attention"),
                _slider("mlp", "the MLPs"),
                _slider("modulation", "the timestep modulation"),
                _slider("adapter", "the LLM adapter"),
                _slider("other", "the embedders and the final layer"),
                io.String.Input(
                    "blocks", default="", optional=True,
                    tooltip="Shares of single blocks, relative to ratio: 0-9:0, 10-27:1. Any depth.",
                ),
            ],
            outputs=[io.Model.Output(display_name="model", tooltip="The merged model, for any node, ModelSave too.")],
        )  # fmt: skip

    @classmethod
    def execute(cls, model1: Any, model2: Any, ratio: float, blocks: str = "", **groups: float) -> io.NodeOutput:
        for model in (model1, model2):
            require_anima(model)
        shares = Strengths({group: groups.get(group, 1.0) for group in GROUPS}, parse_blocks(blocks))
        merged = model1.clone()
        for key, patch in model2.get_key_patches(DIT_ROOT).items():
            share = min(1.0, max(0.0, ratio * shares.of(key.removeprefix(DIT_ROOT))))
            merged.add_patches({key: patch}, share, 1.0 - share)
        return io.NodeOutput(merged)
