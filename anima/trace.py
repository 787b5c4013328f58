"""The named stages inside the DiT, and a log line for each when ANIMA_TRACE=1; otherwise no hook exists at all."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

_log = logging.getLogger("anima")

Keep = Callable[[str, Tensor], None]


def stage_modules(blocks: int) -> dict[str, str]:
    """Canonical module name -> stage, in the order of computation, for a DiT of so many blocks."""
    return {
        "llm_adapter": "adapter rows",
        "x_embedder.proj.1": "patch embedding",
        "t_embedding_norm": "timestep embedding",
        **{f"blocks.{i}": f"block {i} output" for i in range(blocks)},
        "final_layer": "final layer",
    }


def hook_output(module: nn.Module, stage: str, keep: Keep) -> Any:
    """Give a module's output to `keep` at each forward; returns the handle that ends it."""

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        keep(stage, output[0] if isinstance(output, tuple) else output)

    return module.register_forward_hook(hook)


def trace_if_asked(transformer: nn.Module, blocks: int) -> None:
    """Log shape, dtype, mean, std and the number of not-a-numbers of every stage at every forward."""
    if os.environ.get("ANIMA_TRACE") != "1":
        return
    log = partial(_log_stage, {"forward": 0})
    for name, stage in stage_modules(blocks).items():
        hook_output(transformer.get_submodule(name), stage, log)


def _log_stage(state: dict[str, int], stage: str, value: Tensor) -> None:
    state["forward"] += stage == "patch embedding"
    x = value.float()
    _log.info(
        "Anima trace: forward %d, %s: %s %s mean %.5g std %.5g nan %d", state["forward"], stage, list(value.shape),
        str(value.dtype).removeprefix("torch."), x.mean().item(), x.std().item(), int(x.isnan().sum()),
    )  # fmt: skip
