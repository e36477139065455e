"""State that modules keep besides parameters and buffers, in ways that torch provides. A module's `get_extra_state` returns such state, or
the module's own `_save_to_state_dict` or `state_dict` hooks add it under further keys.

Hooks of torch and of sharding frameworks are ignored: they gather parameters, which the snapshot contains anyway.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import Module
from torch.nn.modules.module import _IncompatibleKeys

from ....resilience.errors import SnapshotError
from ..tensors.in_place import Nested
from . import fp8_state
from .module_tensors import named_modules

_OTHERS = ("torch", "megatron", "transformer_engine", "deepspeed")
_EXTRA, FP8 = "_extra_state", "fp8"


class Extra:
    """The extra state of the given modules."""

    def __init__(self, modules: Mapping[str, Module]) -> None:
        """modules: by name. Raises SnapshotError for a module whose extra state could not be restored."""
        self._scaled = {name: module for name, module in modules.items() if fp8_state.has_scaling(module)}
        self._states = {
            name: module
            for name, module in modules.items()
            if name not in self._scaled and _own(module, "get_extra_state") and not fp8_state.pickles(module)
        }
        self._keys = {name: module for name, module in modules.items() if _puts_more(module)}
        for name, module in self._states.items():
            if not _own(module, "set_extra_state"):
                raise SnapshotError(
                    f"the module {name or 'itself'} ({type(module).__name__}) has get_extra_state and no set_extra_state: "
                    "no restart could restore its extra state. Give it both"
                )

    def collect(self) -> Nested:
        kept: Nested = {name: {"state": _boxed(module.get_extra_state())} for name, module in self._states.items()}
        for name, module in self._scaled.items():
            if scaling := fp8_state.collect(module):
                kept[name] = {FP8: scaling}
        for name, module in self._keys.items():
            if more := _more(module):
                kept.setdefault(name, {}).update(keys=more, version=module._version)
        return kept

    def restore(self, kept: Nested) -> None:
        for name, module in self._scaled.items():
            fp8_state.restore(module, kept.get(name, {}).get(FP8, {}))
        for name, module in self._states.items():
            if "state" in kept.get(name, {}):
                module.set_extra_state(_unboxed(kept[name]["state"]))
        for name, module in self._keys.items():
            if "keys" in kept.get(name, {}):
                with torch.no_grad():
                    version = {"version": kept[name].get("version", module._version)}
                    module._load_from_state_dict(dict(kept[name]["keys"]), "", version, False, [], [], [])
                for hook in module._load_state_dict_post_hooks.values():
                    hook(module, _IncompatibleKeys([], []))


def _own(module: Module, method: str) -> bool:
    return getattr(type(module), method) is not getattr(Module, method)


def _puts_more(module: Module) -> bool:
    hooks = [*module._state_dict_pre_hooks.values(), *module._state_dict_hooks.values()]
    saves = type(module)._save_to_state_dict
    return any(map(_of_a_script, hooks)) or (saves is not Module._save_to_state_dict and _of_a_script(saves))


def _of_a_script(hook: Callable[..., Any]) -> bool:
    hook = getattr(hook, "hook", getattr(hook, "func", hook))  # torch and functools wrap hooks
    return (getattr(hook, "__module__", None) or type(hook).__module__).partition(".")[0] not in _OTHERS


def _more(module: Module) -> Nested:
    """Return a module's own `state_dict` entries, without parameters and buffers. Entries of children that also add keys are skipped:
    `collect` calls this function for each such child."""
    known = {name for kind in (module.named_parameters, module.named_buffers) for name, _ in kind()}
    below = named_modules([module]).values()
    tensors = {id(tensor) for each in below for tensor in (*each._parameters.values(), *each._buffers.values())}
    tensors.discard(id(None))
    said: Nested
    if any(map(_of_a_script, (*module._state_dict_pre_hooks.values(), *module._state_dict_hooks.values()))):
        said = dict(module.state_dict(keep_vars=True))
    else:
        module._save_to_state_dict(said := {}, "", True)
    children = {f"{name}." for name, child in module.named_modules() if name and _puts_more(child)}
    return {
        key: value
        for key, value in said.items()
        if key not in known
        and id(value) not in tensors
        and not key.endswith(_EXTRA)
        and not any(map(key.startswith, children))
    }


def _boxed(value: Any) -> Nested:
    return {"bytes": value.getvalue()} if isinstance(value, io.BytesIO) else {"value": value}


def _unboxed(kept: Nested) -> Any:
    return io.BytesIO(kept["bytes"]) if "bytes" in kept else kept["value"]
