"""FP8 state of Transformer Engine's modules: the scales and the history of maxima (amax) of delayed scaling, forward and backward.

    module.fp8_meta["scaling_fwd"].scale, .amax_history     and "scaling_bwd"; other recipes (current, block scaling) keep no such tensors

The tensors are saved and restored in place: Transformer Engine's global buffers of maxima are views of them. Its own `get_extra_state`
pickles copies and waits for the device, and its own `set_extra_state` refuses pickled state from 2.20 on. In a new process the module makes
the tensors in its first forward pass. So a restored state waits until then.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import Module

from ...attach.rank_stderr import say
from ..tensors.in_place import Nested, put

_DIRECTIONS, _TENSORS = ("scaling_fwd", "scaling_bwd"), ("scale", "amax_history")
_MAKES = "init_fp8_meta_tensors"
"""The method with which a module makes the tensors."""


def has_scaling(module: Module) -> bool:
    """Return whether the module is one of Transformer Engine's that may have scales."""
    return isinstance(getattr(module, "fp8_meta", None), dict) and hasattr(module, _MAKES)


def collect(module: Module) -> Nested:
    """Return the module's live tensors, or the restored ones that wait; empty if it has none."""
    waiting = module.__dict__.get(_MAKES)
    return waiting.kept if isinstance(waiting, _Waiting) else _live(module)


def restore(module: Module, kept: Nested) -> None:
    """Restore what `collect` returned, now or when the module makes its tensors. kept: empty if the module had none. Then a later first
    forward pass makes them anew."""
    module.__dict__.pop(_MAKES, None)
    if live := _live(module):
        _fill(module, live, kept)
    elif kept:
        module.__dict__[_MAKES] = _Waiting(module, kept)
    for parameter in module.parameters(recurse=False):
        if hasattr(parameter, "_transpose_invalid"):
            parameter._transpose_invalid = True  # a copy of a float8 parameter, made from what was there before


class _Waiting:
    """Stands in front of the method that makes a module's tensors, once."""

    def __init__(self, module: Module, kept: Nested) -> None:
        self._module, self.kept = module, kept

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._module.__dict__.pop(_MAKES, None)
        made = getattr(self._module, _MAKES)(*args, **kwargs)
        _fill(self._module, _live(self._module), self.kept)
        return made


def _live(module: Any) -> Nested:
    found: Nested = {}
    for direction in _DIRECTIONS:
        tensors = {name: getattr(module.fp8_meta.get(direction), name, None) for name in _TENSORS}
        found |= {f"{direction}.{name}": each for name, each in tensors.items() if torch.is_tensor(each)}
    return found


def _fill(module: Module, live: Nested, kept: Nested) -> None:
    """Put the kept values into the live tensors. A tensor that was not there begins as Transformer Engine makes it."""
    for name, tensor in live.items():
        direction, _, what = name.rpartition(".")
        if name not in kept:
            tensor.fill_(1.0 if what == "scale" else 0.0)
        elif kept[name].shape == tensor.shape:
            put(tensor, kept[name])
        else:
            say(
                f"{type(module).__name__} has another FP8 {what} ({direction}) than the snapshot: {tuple(tensor.shape)}, not "
                f"{tuple(kept[name].shape)}. It begins anew"
            )
