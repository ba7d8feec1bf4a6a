"""How large a workspace a computation takes: the memory claim of the full-size benchmark and of its test."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class LargestAllocation(TorchDispatchMode):
    """`bytes` of the largest tensor that an operator made inside this context; views and writes in place make none."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not func.is_view and not func._schema.is_mutable:
            self.bytes = max(self.bytes, result.nbytes)
        return result
