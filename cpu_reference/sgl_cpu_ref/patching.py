"""Small tools that put a reference in the place of an attribute of SGLang."""

import contextlib
import functools
import importlib
import sys
from typing import Any, Callable, Iterator, Tuple


def replace_everywhere(module_name: str, name: str, new: Any) -> None:
    """Set ``module_name.name`` to ``new``, and every ``from module_name import name`` binding made earlier in SGLang.

    Raises AttributeError where the module has no such name, so a moved kernel is noticed at once.
    """
    module = importlib.import_module(module_name)
    old = getattr(module, name)
    setattr(module, name, new)
    for other in list(sys.modules.values()):
        if not getattr(other, "__name__", "").startswith("sglang"):
            continue
        if getattr(other, "__dict__", {}).get(name) is old:
            setattr(other, name, new)


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
