"""A stand-in for SGLang's CUDA kernels, which have no CPU wheel.

SGLang imports names from `sgl_kernel` at start-up, and calls none of them on a CPU. Here every name can be imported,
and raises when it is called. The same holds for the operators of `torch.ops.sgl_kernel` that SGLang looks up while it
is imported on a CPU: without them its processors of images cannot be imported. Only the CPU platform finds this
package, since it puts the folder at the end of the path.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NoReturn

import torch

# Of SGLang 0.5.12 to 0.5.20. No others: SGLang asks for some names (`convert_weight_packed`) to learn whether there are
# kernels for this CPU.
_OPERATORS = (
    "fused_gdn_gating_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    "fused_sigmoid_gating_delta_rule_update_cpu",
    "fused_sigmoid_mul_cpu",
)


class _Missing:
    """A name of `sgl_kernel`: its attributes can be read, and calling it raises."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, name: str) -> _Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self.__name__}.{name}")

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise RuntimeError(
            f"sgl_kernel.{self.__name__} is a CUDA kernel; the CPU platform has only a stand-in for its name"
        )


class _Submodule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self.__name__.partition('.')[2]}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import finder and loader that makes any `sgl_kernel.x.y` importable."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if fullname.startswith("sgl_kernel."):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        return _Submodule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        return


sys.meta_path.append(_Finder())
for _name in _OPERATORS:
    if not hasattr(torch.ops.sgl_kernel, _name):
        setattr(torch.ops.sgl_kernel, _name, _Missing(f"ops.{_name}"))


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Missing(name)
