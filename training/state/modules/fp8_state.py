"""FP8 state of Transformer Engine's modules: the scales and the history of maxima (amax) of delayed scaling, forward and backward.

    module.fp8_meta["scaling_fwd"].scale, .amax_history     and "scaling_bwd"; up to 1.10 also .scale_inv
    operation._fp8_metas["forward"]["scaling_fwd"].scale …  of fused operations (te.ops)

Other recipes (current, block scaling) keep no such tensors. The tensors are saved and restored in place: Transformer Engine's global
buffers of maxima are views of them. Transformer Engine's own `get_extra_state` pickles copies and waits for the device, and its
`set_extra_state` unpickles the copies, which newer versions refuse. In a new process, a module creates the tensors in its first forward
pass. So a restored state is kept until that forward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import Module

from ...attach.rank_stderr import say
from ..tensors.in_place import Nested, put

_DIRECTIONS, _TENSORS = ("scaling_fwd", "scaling_bwd"), ("scale", "scale_inv", "amax_history")
_MAKES = ("init_fp8_meta_tensors", "reset_recipe_state", "_reset_quantization_recipe_state")
"""The methods with which a module creates the tensors: first that of most modules, then those of fused operations in newer and in older
versions."""


def has_scaling(module: Module) -> bool:
    """Return whether the module belongs to Transformer Engine and may have scales."""
    return bool(_makes(module))


def pickles(module: Module) -> bool:
    """Return whether the module's extra state is the pickled one of Transformer Engine."""
    return type(module).get_extra_state.__module__.startswith("transformer_engine")


def collect(module: Module) -> Nested:
    """Return the module's live tensors, or else the restored tensors that wait for the first forward pass; empty if there are none."""
    waiting = module.__dict__.get(_makes(module))
    return waiting.kept if isinstance(waiting, _Waiting) else _live(module)


def restore(module: Module, kept: Nested) -> None:
    """Restore what `collect` returned, now or when the module creates its tensors. kept: empty if the module had no tensors; the first
    forward pass after the restore then creates the tensors anew."""
    module.__dict__.pop(_makes(module), None)
    if _live(module):
        _fill(module, kept)
    elif kept:
        module.__dict__[_makes(module)] = _Waiting(module, kept)


class _Waiting:
    """Takes the place of the method that creates a module's tensors. Calls the method and, once the tensors exist, fills them from the
    restored state and removes itself."""

    def __init__(self, module: Module, kept: Nested) -> None:
        self._module, self.kept = module, kept

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        made = getattr(type(self._module), _makes(self._module))(self._module, *args, **kwargs)
        if _live(self._module):
            self._module.__dict__.pop(_makes(self._module), None)
            _fill(self._module, self.kept)
        return made


def _makes(module: Module) -> str:
    """Return the name of the method that creates the module's tensors; empty if there is none."""
    holds = hasattr(module, "fp8_meta") or hasattr(module, "_fp8_metas")
    return next((method for method in _MAKES if holds and hasattr(module, method)), "")


def _live(module: Any) -> Nested:
    fused = (getattr(module, "_fp8_metas", None) or {}).values()
    metas = [meta for meta in (getattr(module, "fp8_meta", None), *fused) if meta]
    found: Nested = {}
    for direction in _DIRECTIONS:
        state = next((meta[direction] for meta in metas if direction in meta), None)
        tensors = {name: getattr(state, name, None) for name in _TENSORS}
        found |= {f"{direction}.{name}": each for name, each in tensors.items() if torch.is_tensor(each)}
    return found


def _fill(module: Any, kept: Nested) -> None:
    """Put the kept values into the live tensors. If a direction is not in `kept`, or has other shapes there, its tensors get the values
    with which Transformer Engine creates them."""
    for direction in _DIRECTIONS:
        history = f"{direction}.amax_history"
        if history in kept and history in _live(module) and hasattr(module, "adjust_amax_history_length"):
            module.adjust_amax_history_length(len(kept[history]), fwd=direction == "scaling_fwd")
    live = _live(module)
    for direction in _DIRECTIONS:
        names = [name for name in live if name.startswith(direction)]
        fits = all(name in kept and kept[name].shape == live[name].shape for name in names)
        for name in names:
            if fits:
                put(live[name], kept[name])
            else:
                live[name].fill_(0.0 if name.endswith("amax_history") else 1.0)
        if not fits and any(name in kept for name in names):
            say(
                f"the FP8 scales and maxima of {type(module).__name__} ({direction}) have another shape in the snapshot: they begin anew, "
                "as in a new module"
            )
