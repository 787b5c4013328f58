"""A weight that stays packed in memory and is unpacked where it is used.

`PackedTensor` looks like a dense tensor of its logical shape and dtype: any operation on it works on the unpacked
values, only moving between devices and copying keep it packed. So a plain Linear, ComfyUI's Linear, LoRA patching and
offloading all take it as they take a dense weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

Unpack = tuple[Any, ...]
"""A module-level function and its first arguments; the parts come last, float32 values (of any shape) come out."""


class PackedTensor(Tensor):
    """A quantised weight.

    Args:
        parts: What is stored: the packed values, scales, tables.
        unpack: How the parts become values.
        shape: Logical shape.
        dtype: Logical dtype: what unpacking gives.
    """

    _parts: dict[str, Tensor]
    _unpack: Unpack

    @staticmethod
    def __new__(cls, parts: dict[str, Tensor], unpack: Unpack, shape: tuple[int, ...], dtype: torch.dtype):
        device = next(iter(parts.values())).device
        out = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device, requires_grad=False)
        out._parts, out._unpack = parts, unpack
        return out

    def __init__(self, *args: Any) -> None:
        pass

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        aten = torch.ops.aten
        packed = args[0] if args and isinstance(args[0], cls) else None
        if packed is not None and func in (aten.detach.default, aten.alias.default):
            return packed._with(packed._parts)
        if packed is not None and func is aten.clone.default:
            return packed._with({name: part.clone() for name, part in packed._parts.items()})
        if packed is not None and func is aten._to_copy.default and kwargs.get("dtype") in (None, packed.dtype):
            device = kwargs.get("device") or packed.device
            blocking = kwargs.get("non_blocking", False)
            return packed._with({n: p.to(device, non_blocking=blocking, copy=True) for n, p in packed._parts.items()})

        def dense(value: Any) -> Any:
            return value.unpacked() if isinstance(value, cls) else value

        return func(*tree_map(dense, args), **tree_map(dense, kwargs))

    def _with(self, parts: dict[str, Tensor], dtype: torch.dtype | None = None) -> PackedTensor:
        return PackedTensor(parts, self._unpack, tuple(self.shape), dtype or self.dtype)

    def with_dtype(self, dtype: torch.dtype) -> PackedTensor:
        """The same packed values, to be unpacked to another dtype."""
        return self._with(self._parts, dtype)

    def unpacked(self) -> Tensor:
        """The dense tensor, in the logical dtype."""
        function, *arguments = self._unpack
        return function(*arguments, self._parts).reshape(self.shape).to(self.dtype)

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes really stored; ComfyUI counts memory by this."""
        return sum(part.nbytes for part in self._parts.values())

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PackedTensor({list(self.shape)}, {self.dtype}, {self.nbytes} bytes)"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        for name, part in self._parts.items():
            setattr(self, f"part_{name}", part)
        return [f"part_{name}" for name in self._parts], (self._unpack, tuple(self.shape), self.dtype)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: Any, outer_size: Any, outer_stride: Any
    ) -> PackedTensor:
        unpack, shape, dtype = context
        return PackedTensor({name.removeprefix("part_"): part for name, part in inner.items()}, unpack, shape, dtype)
