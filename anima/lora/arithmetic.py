"""What a LoRA of any kind does to a weight, in plain float32 arithmetic, for use without ComfyUI.

Inside ComfyUI its own weight adapters do this; here are the same formulas (LyCORIS' definitions, with ComfyUI's
reading of `alpha` and DoRA), on the standard suffixes of `mapping`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..errors import InputError

Module = Mapping[str, Tensor]


def patched_weight(weight: Tensor, module: Module, strength: float) -> Tensor:
    """A weight with one module of a LoRA applied.

    Args:
        weight: Of any floating-point dtype and shape.
        module: Standard suffix -> tensor.
        strength: Multiplier of the change.

    Returns:
        Same shape and dtype.

    Raises:
        InputError: the kind is not known here, or shapes do not fit.
    """
    module = {suffix: tensor.to(weight.device, torch.float32) for suffix, tensor in module.items()}
    original = weight.float()
    if ".set_weight" in module:
        return module[".set_weight"].to(weight)
    try:
        out = _patched(original, module, strength)
    except RuntimeError as error:
        raise InputError(
            "A module of the LoRA does not fit the model.",
            found=str(error),
            expected=f"a change of {list(weight.shape)}",
        ) from error
    return out.to(weight.dtype)


def _patched(weight: Tensor, module: Module, strength: float) -> Tensor:
    blocks = module.get(".oft_blocks")
    if blocks is not None:
        return _rotated(weight, blocks, module, strength)
    change, scale = _change(weight, module)
    if ".dora_scale" not in module:
        return weight + strength * scale * change.reshape(weight.shape)
    moved = weight + scale * change.reshape(weight.shape)
    magnitude = module[".dora_scale"]
    by_row = magnitude.shape[0] == weight.shape[0]
    norm = weight.norm(dim=1, keepdim=True) if by_row else moved.norm(dim=0, keepdim=True)
    moved = moved * (magnitude / (norm + torch.finfo(weight.dtype).eps))
    return weight + strength * (moved - weight)


def _change(weight: Tensor, module: Module) -> tuple[Tensor, float]:
    """The change at strength 1 and the factor alpha / rank."""
    alpha = module.get(".alpha")

    def scale(rank: int) -> float:
        return 1.0 if alpha is None else float(alpha) / rank

    if ".lora_up.weight" in module:
        up, down = module[".lora_up.weight"], module[".lora_down.weight"]
        return up.flatten(1) @ down.flatten(1), scale(down.shape[0])
    if ".hada_w1_a" in module:
        first = module[".hada_w1_a"] @ module[".hada_w1_b"]
        return first * (module[".hada_w2_a"] @ module[".hada_w2_b"]), scale(module[".hada_w1_b"].shape[0])
    if ".lokr_w1" in module or ".lokr_w1_a" in module:
        (first, rank_1), (second, rank_2) = (_lokr_factor(module, f".lokr_w{i}") for i in (1, 2))
        rank = rank_2 or rank_1
        return torch.kron(first, second), scale(rank) if rank else 1.0
    if ".a1.weight" in module:
        a1, a2, b1, b2 = (module[f".{name}.weight"] for name in ("a1", "a2", "b1", "b2"))
        return weight @ a1 @ a2 + b1 @ b2, scale(a2.shape[0])
    for suffix in (".diff", ".w_norm"):
        if suffix in module:
            return module[suffix], 1.0
    if ".weight" in module and ".on_input" in module:
        return _ia3(weight, module), 1.0
    raise InputError("This kind of LoRA is not known outside ComfyUI.", found=", ".join(sorted(module)))


def _lokr_factor(module: Module, name: str) -> tuple[Tensor, int | None]:
    """A Kronecker factor and, when it is a product itself, its rank."""
    if name in module:
        return module[name], None
    return module[name + "_a"] @ module[name + "_b"], module[name + "_b"].shape[0]


def _ia3(weight: Tensor, module: Module) -> Tensor:
    scale = module[".weight"].flatten()
    return weight * (scale[None] if bool(module[".on_input"]) else scale[:, None])


def _rotated(weight: Tensor, blocks: Tensor, module: Module, strength: float) -> Tensor:
    """OFT (blocks: n, b, b) and BOFT (m, n, b, b): the rows of the weight turned by Cayley rotations."""
    identity = torch.eye(blocks.shape[-1])
    skew = blocks - blocks.transpose(-1, -2)
    limit = float(module.get(".alpha", torch.tensor(0.0)))
    size = float(skew.norm()) + 1e-8
    if 0 < limit < size:
        skew = skew * (limit / size)
    rotation = (identity + skew) @ torch.linalg.inv(identity - skew)
    if blocks.ndim == 3:
        rows = weight.unflatten(0, blocks.shape[:2])
        return weight + strength * torch.einsum("knm,kn...->km...", rotation - identity, rows).flatten(0, 1)
    out = weight
    for level, turn in enumerate(rotation):
        turn = turn * strength + (1 - strength) * identity
        step = 2**level * (blocks.shape[-1] // 2)
        out = out.unflatten(0, (-1, 2, step)).transpose(1, 2).flatten(0, 2).unflatten(0, (-1, blocks.shape[-1]))
        out = torch.einsum("bij,bj...->bi...", turn, out).flatten(0, 1)
        out = out.unflatten(0, (-1, step, 2)).transpose(1, 2).flatten(0, 2)
    if ".rescale" in module:
        out = out * module[".rescale"]
    return weight + strength * (out - weight)
