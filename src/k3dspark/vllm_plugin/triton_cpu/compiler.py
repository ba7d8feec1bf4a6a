"""The compiler half of the backend: it refuses to compile."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from triton.backends.compiler import BaseBackend, GPUTarget, Language


class InterpretedBackend(BaseBackend):
    """Never asked for code while TRITON_INTERPRET=1."""

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        return bool(target.backend == "cpu")

    def hash(self) -> str:
        return "k3dspark-interpreter"

    def parse_options(self, options: dict[str, Any]) -> dict[str, Any]:
        return options

    def add_stages(self, stages: dict[str, Any], options: object, language: Language) -> None:
        raise RuntimeError("no Triton kernel is compiled for a CPU: set TRITON_INTERPRET=1")

    def load_dialects(self, context: object) -> None:
        pass

    def get_module_map(self) -> dict[str, ModuleType]:
        return {}
