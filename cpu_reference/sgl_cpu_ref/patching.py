"""Small tools that put a reference in the place of an attribute of SGLang."""

import contextlib
import functools
import importlib
import sys
from typing import Any, Callable, Dict, Iterator, Tuple

_originals: Dict[Tuple[str, str], Any] = {}


def original(module_name: str, name: str) -> Any:
    """What ``module_name.name`` is in SGLang itself, whether or not it was replaced here; ``name`` may be ``Class.attr``."""
    if (module_name, name) in _originals:
        return _originals[module_name, name]
    value = importlib.import_module(module_name)
    for part in name.split("."):
        value = getattr(value, part)
    return value


def replace_everywhere(module_name: str, name: str, new: Any) -> None:
    """Set ``module_name.name`` to ``new``, and every ``from module_name import name`` binding made earlier in SGLang.

    Raises AttributeError where the module has no such name, so a moved kernel is noticed at once.
    """
    module = importlib.import_module(module_name)
    old = getattr(module, name)
    _originals.setdefault((module_name, name), old)
    setattr(module, name, new)
    for other in list(sys.modules.values()):
        if not getattr(other, "__name__", "").startswith("sglang"):
            continue
        if getattr(other, "__dict__", {}).get(name) is old:
            setattr(other, name, new)


def replace_static(cls: type, name: str, new: Callable) -> None:
    """Set ``cls.name`` to the static method ``new``; AttributeError where the class has no such name."""
    _originals.setdefault((cls.__module__, f"{cls.__name__}.{name}"), getattr(cls, name))
    setattr(cls, name, staticmethod(new))


@contextlib.contextmanager
def device_capability(capability: Tuple[int, int] = (9, 0)) -> Iterator[None]:
    """While open, ``torch.cuda.get_device_capability`` answers ``capability`` (Hopper), with no CUDA device present."""
    import torch

    old = torch.cuda.get_device_capability
    torch.cuda.get_device_capability = lambda *args, **kwargs: capability
    try:
        yield
    finally:
        torch.cuda.get_device_capability = old


def with_device_capability(cls: type, name: str) -> None:
    """Wrap the method ``cls.name`` in `device_capability`."""
    method: Callable = getattr(cls, name)

    @functools.wraps(method)
    def wrapped(*args, **kwargs):
        with device_capability():
            return method(*args, **kwargs)

    setattr(cls, name, wrapped)


class Launchable:
    """A torch function called with Triton's launch syntax, ``kernel[grid](...)``; the grid is ignored."""

    def __init__(self, function: Callable) -> None:
        self.function = function
        functools.update_wrapper(self, function)

    def __getitem__(self, grid) -> Callable:
        return self.function
