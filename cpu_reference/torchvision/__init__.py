"""Stub of torchvision for machines without a GPU.

``sglang.srt.utils.common`` imports ``torchvision.io.decode_jpeg`` at module level, and the torchvision wheels for Linux
need CUDA libraries. Any submodule can be imported here, and any attribute of one is a class whose instances cannot be
made.
"""

import importlib.abc
import importlib.machinery
import sys
import types

__version__ = "0.0.0+stub"


class _StubMeta(type):
    """Attributes of a stub class are strings that name themselves."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class _StubModule(types.ModuleType):
    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        def refuse(instance, *args, **kwargs):
            raise NotImplementedError(f"torchvision stub: {self.__name__}.{name}")

        value = _StubMeta(name, (), {"__init__": refuse})
        setattr(self, name, value)
        return value


class _StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.startswith("torchvision."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _StubModule(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, _StubFinder())
