"""A stand-in for SGLang's CUDA kernels, which have no CPU wheel.

SGLang imports names from `sgl_kernel` at start-up, and calls none of them on a CPU. Here every name can be imported,
and raises when it is called. Only the CPU platform finds this package, since it puts the folder at the end of the path.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NoReturn


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


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Missing(name)
