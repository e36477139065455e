"""Find the parameters and buffers of modules by torch's names. One walk is enough while the structure of the modules is unchanged.

torch's own two walks (`named_parameters`, `named_buffers`) take some microseconds for each module, and a large model has thousands. torch's
walks would take longer than all other work of a snapshot between two steps. The walk here reads everything that decides the names: the
modules' types, the names in each module, and which modules and tensors are identical. The walk returns the present tensors and keeps no
reference to them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch.nn import Module

from ..tensors.fsdp_groups import by_fsdp, shard_again

Named: TypeAlias = dict[str, torch.Tensor]

_NAMING = ("named_parameters", "named_buffers", "named_modules", "_named_members")
"""Methods that also decide the names if a module overrides them."""
_FRAMEWORKS = frozenset(("torch", "megatron", "transformer_engine", "deepspeed", "apex"))


class Names:
    def __init__(self) -> None:
        self._form: list[Any] | None = None
        """The structure that the last walk read, without the tensors. None if each walk has to call torch's methods."""
        self._names: list[tuple[list[str], list[int]]] = []
        """For parameters and then for buffers: the names, and each name's index among the tensors that a walk finds."""
        self.modules: list[Module] = []
        """All modules that the last walk found."""
        self.anew = True
        """Whether the structure has changed, or may have changed, since the previous walk."""
        self._by_fsdp: list[Any] = []
        self._seen = False

    def shard_again(self) -> None:
        shard_again(self._by_fsdp)

    def of(self, chunks: Sequence[Module]) -> tuple[Named, Named]:
        """Return the parameters and the buffers of one module, or of the chunks of a pipeline stage."""
        self.modules, form, found = _look(chunks)
        self.anew = self._form is None or form != self._form
        if self.anew:
            first, self._by_fsdp = not self._seen, by_fsdp(self.modules)
            self._seen = True
            if first and shard_again(
                self._by_fsdp
            ):  # all ranks look at their models for the first time at the same point
                self.modules, form, found = _look(chunks)
            return self._anew(chunks, self.modules, form, found)
        parameters, buffers = (
            dict(zip(names, [found[place] for place in places], strict=True)) for names, places in self._names
        )
        return parameters, buffers

    def _anew(
        self, chunks: Sequence[Module], modules: Sequence[Module], form: list[Any], found: Sequence[torch.Tensor | None]
    ) -> tuple[Named, Named]:
        parameters, buffers = dict(_named(chunks, "named_parameters")), dict(_named(chunks, "named_buffers"))
        if any(map(_may_hide, modules)):
            _add_hidden(chunks, parameters, buffers)
        place = {id(tensor): number for number, tensor in enumerate(found)}
        known = all(id(tensor) in place for tensor in (*parameters.values(), *buffers.values()))
        self._form = form if known and all(map(_as_torch_does, modules)) else None
        if self._form is not None:
            self._names = [
                (list(named), [place[id(tensor)] for tensor in named.values()]) for named in (parameters, buffers)
            ]
        return parameters, buffers


def _named(chunks: Sequence[Module], what: str) -> Iterator[tuple[str, torch.Tensor]]:
    for index, chunk in enumerate(chunks):
        prefix = f"chunk{index}." if len(chunks) > 1 else ""
        for name, tensor in getattr(chunk, what)():
            yield prefix + name, tensor


def join(path: str, name: str) -> str:
    return ".".join(filter(None, (path, name)))


def named_modules(chunks: Sequence[Module]) -> dict[str, Module]:
    """Return all modules by path, as torch names them, including modules that their parent module hides."""
    found: dict[str, Module] = {}
    seen: set[int] = set()

    def down(module: Module, path: str) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        found[path] = module
        for name, child in module._modules.items():
            if child is not None:
                down(child, join(path, name))

    for index, chunk in enumerate(chunks):
        seen.clear()
        down(chunk, f"chunk{index}" if len(chunks) > 1 else "")
    return found


def _add_hidden(chunks: Sequence[Module], parameters: Named, buffers: Named) -> None:
    """Add the tensors that modules hide, such as those of a teacher network that no optimizer may see."""
    known = {*map(id, parameters.values()), *map(id, buffers.values())}
    for path, module in named_modules(chunks).items():
        for held, named in ((module._parameters, parameters), (module._buffers, buffers)):
            for key, tensor in held.items():
                if tensor is None or id(tensor) in known:
                    continue
                name = join(path, key)
                while name in parameters or name in buffers:
                    name += "~"
                named[name] = tensor
                known.add(id(tensor))


def _look(chunks: Sequence[Module]) -> tuple[list[Module], list[Any], list[torch.Tensor | None]]:
    """Return all modules below `chunks`, their structure, and their tensors in the order of the walk."""
    modules, found = list(chunks), []
    form: list[Any] = [len(chunks)]
    number = {id(module): at for at, module in enumerate(modules)}
    for module in modules:  # the loop extends the list
        parameters, buffers, children = module._parameters, module._buffers, module._modules
        form.append(type(module))
        if parameters:
            form += parameters
            found += parameters.values()
        form.append(len(found))
        if buffers:
            form += buffers
            found += buffers.values()
        if children:
            form.append(len(found))
            for name, child in children.items():
                at = -1 if child is None else number.setdefault(id(child), len(modules))
                if at == len(modules):
                    modules.append(child)
                form += (name, at)
    form += map(id, found)  # ids: two equal ids in one walk are the same tensor. None always has the same id
    return modules, form, found


def _as_torch_does(module: Module) -> bool:
    return all(getattr(getattr(module, name), "__func__", None) is getattr(Module, name) for name in _NAMING)


def _may_hide(module: Module) -> bool:
    """Whether a module names its tensors itself. torch and sharding frameworks do so too, but return all tensors, so they don't count."""
    if _as_torch_does(module):
        return False
    own = (getattr(getattr(module, name), "__func__", getattr(module, name)) for name in _NAMING)
    roots = {str(getattr(method, "__module__", "")).partition(".")[0] for method in own}
    return not roots <= _FRAMEWORKS
