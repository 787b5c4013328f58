"""Qwen3 hidden states, from `transformers`' Qwen3Model on any Qwen3 file."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from ..config import Shape, count_blocks
from ..errors import CheckpointError, MissingPackageError, check_tensors

ROPE_THETA = 1_000_000.0
NORM_EPS = 1e-6


def qwen3_dimensions(shapes: Mapping[str, Shape]) -> dict[str, int]:
    """Dimensions of a Qwen3 from its tensors' shapes, under the names Hugging Face's config uses.

    Args:
        shapes: Names below `model.` as in `qwen_3_06b_base.safetensors`.
    """
    try:
        layer = "model.layers.0."
        head_dim = shapes[layer + "self_attn.q_norm.weight"][0]
        vocab_size, hidden_size = shapes["model.embed_tokens.weight"]
        return {
            "vocab_size": vocab_size,
            "hidden_size": hidden_size,
            "intermediate_size": shapes[layer + "mlp.gate_proj.weight"][0],
            "num_hidden_layers": count_blocks(shapes, "model.layers."),
            "num_attention_heads": shapes[layer + "self_attn.q_proj.weight"][0] // head_dim,
            "num_key_value_heads": shapes[layer + "self_attn.k_proj.weight"][0] // head_dim,
            "head_dim": head_dim,
        }
    except KeyError as error:
        raise CheckpointError(
            f"The text encoder lacks the tensor {error}.", expected="a complete Qwen3", fix="Download the file again."
        ) from error


def qwen3_shapes(dims: Mapping[str, int]) -> dict[str, Shape]:
    """Name -> shape of every tensor of a Qwen3 with these dimensions, in the order of the checkpoint."""
    hidden, head, mlp = dims["hidden_size"], dims["head_dim"], dims["intermediate_size"]
    queries, keys = dims["num_attention_heads"] * head, dims["num_key_value_heads"] * head
    layer: dict[str, Shape] = {
        "self_attn.q_proj.weight": (queries, hidden), "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden), "self_attn.o_proj.weight": (hidden, queries),
        "self_attn.q_norm.weight": (head,), "self_attn.k_norm.weight": (head,),
        "mlp.gate_proj.weight": (mlp, hidden), "mlp.up_proj.weight": (mlp, hidden),
        "mlp.down_proj.weight": (hidden, mlp), "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }  # fmt: skip
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (dims["vocab_size"], hidden)}
    for index in range(dims["num_hidden_layers"]):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes | {"model.norm.weight": (hidden,)}


def check_qwen3(shapes: Mapping[str, Shape], path: str | PathLike[str], packed: bool = False) -> dict[str, int]:
    """Check canonical tensors against the architecture and return its dimensions.

    Args:
        packed: The file is quantised: weights may have other shapes and extra tensors.

    Raises:
        CheckpointError: tensors are missing, surplus or of the wrong shape.
    """
    dims = qwen3_dimensions(shapes)
    expected = qwen3_shapes(dims)
    problems = {"lacks tensors": [name for name in expected if name not in shapes]}
    if not packed:
        problems |= {
            "has tensors of the wrong shape": [n for n, s in expected.items() if n in shapes and shapes[n] != s],
            "has tensors a Qwen3 does not have": [name for name in shapes if name not in expected],
        }
    check_tensors(
        "The text encoder file",
        problems,
        file=path,
        expected=f"the {len(expected)} tensors of a Qwen3 with {dims['num_hidden_layers']} layers",
        fix="Download qwen_3_06b_base.safetensors again.",
    )
    return dims


def load_qwen3(state_dict: Mapping[str, Tensor], dtype: torch.dtype = torch.float32) -> nn.Module:
    """Build Qwen3Model on tensors named `model.*`, strictly.

    Norms and attention round as ComfyUI's do, see `qwen3_layers`.
    """
    try:
        from transformers import Qwen3Config, Qwen3Model

        from .qwen3_layers import round_as_comfyui
    except ImportError as error:
        raise MissingPackageError("transformers", "The text encoder outside ComfyUI") from error
    dims: dict[str, Any] = qwen3_dimensions({key: tuple(t.shape) for key, t in state_dict.items()})
    config = Qwen3Config(
        **dims, rms_norm_eps=NORM_EPS, rope_theta=ROPE_THETA, attn_implementation="sdpa", tie_word_embeddings=True
    )
    model = Qwen3Model(config)
    round_as_comfyui(model)
    model.load_state_dict({key.removeprefix("model."): t.to(dtype) for key, t in state_dict.items()}, strict=True)
    return model.to(dtype).requires_grad_(False).eval()


def hidden_states(model: nn.Module, ids: list[int]) -> Tensor:
    """Last hidden states after the final norm, (1, N, hidden_size). A lone pad token counts as masked padding."""
    device = next(model.parameters()).device
    return model(input_ids=torch.tensor([ids], device=device)).last_hidden_state
