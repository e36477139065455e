"""Modules as a source (an object that the Session saves): parameters and buffers by name. The source also contains the modules' other state
(`extra_state.py`, `module_attributes.py`) and the changes of their structure since the loop began (`module_structure.py`), if there are
any.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ....checkpoint.arena.staging import refuse
from ....checkpoint.format.tensor_table import Piece
from ....resilience.errors import LayoutError
from ..tensors.finite_check import finite, sums
from ..tensors.in_place import Nested, misfit, put
from ..tensors.tensor_subclasses import all_ordinary, forget_copies, ordinary
from ..values.borrowed_memory import Lenders
from .extra_state import Extra
from .module_attributes import Attributes
from .module_structure import Objects, Outline, same_shape
from .module_tensors import Named, Names, named_modules

CHANGED, EXTRA, ATTRIBUTES, BOUND = ".changed", ".extra", ".attributes", "bound"
"""Keys besides the tensors' names. Torch allows no name that begins with a dot."""
_STATELESS: Any = (type(None), getattr(torch.distributed, "ProcessGroup", type(None)))
"""Types of a communication hook's state that store nothing between steps."""
_NAMED = 3
"""The most tensors that an error message names when tensors do not fit."""
_parameter, _buffer = "the parameter {}".format, "the buffer {}".format
_MADE = attrgetter("shape", "dtype", "requires_grad")


class Modules:
    """Parameters and buffers, including non-persistent ones, of one module or of the chunks of a pipeline stage."""

    def __init__(self, chunks: Sequence[torch.nn.Module], lenders: Lenders | None = None, name: str = "") -> None:
        """lenders: sources whose memory the attributes may use; by default only these modules. name: the source's name in messages."""
        self._name = name
        self.chunks = chunks if type(chunks) is list else list(chunks)  # the script may replace modules in its list
        self._lenders = Lenders() if lenders is None else lenders
        if lenders is None:
            self._lenders.add("", self.lent)
            self._lenders.modules[""] = self.by_path
        self._names = Names()
        self._outline: Outline | None = None
        """The modules' structure; None until the loop begins."""
        self._extra, self._attributes = Extra({}), Attributes({}, self._lenders, name)
        self._stale = True
        """Whether the modules have changed since `_extra` was created."""
        self._seen: list[Any] = []
        self._changes: Nested = {}
        self.bound = ""
        """The reason why no new process could restore the last collected state; empty if one could."""
        self.buffers: frozenset[str] = frozenset()
        """The names of the buffers in the last collected state."""
        self._made: list[Any] = []
        self._trained: list[str] = []
        self._unjudged: frozenset[str] = frozenset()

    def named(self) -> tuple[Named, Named]:
        """Return the parameters and the buffers, by name, as the modules have them."""
        parameters, buffers = self._names.of(self.chunks)
        self._stale = self._stale or self._names.anew
        return parameters, buffers

    def known_as(self, source: str) -> Named:
        """Return the parameters by their names in the Session, which calls the modules `source`."""
        return {f"{source}/{name}": parameter for name, parameter in self.named()[0].items()}

    def hooked(self, wrappers: Iterable[DistributedDataParallel] = ()) -> str:
        """Return the name of DistributedDataParallel's communication hook if it has a state, such as PowerSGD's errors; otherwise an empty
        text. torch's private states, as for mixed precision, keep nothing between steps. wrappers: further wrappers to search; a wrapper is
        ignored if it contains none of these modules."""
        mine = {id(module) for chunk in self.chunks for module in chunk.modules()}
        around = (each for each in wrappers if not mine.isdisjoint(map(id, each.modules())))
        hooks = (hook for each in (*self.chunks, *around) for hook in getattr(each, "_comm_hooks", ()))
        named = ((getattr(hook, "__name__", "of the script"), state) for hook, state in hooks)
        return next((n for n, s in named if not isinstance(s, _STATELESS) and type(s).__name__[:1] != "_"), "")

    def lent(self) -> Named:
        """Return the tensors whose memory the values of other sources may use."""
        parameters, buffers = self.named()
        return parameters | buffers

    def trained_attributes(self, *, anew: bool = False) -> list[torch.Tensor]:
        """Return the tensors in attributes that may have gradients: those of the last snapshot, or with `anew` the present ones."""
        if anew:
            self._attributes.collect()
        return self._attributes.trained

    @property
    def modules(self) -> Sequence[torch.nn.Module]:
        """Return all modules that the last walk found."""
        return self._names.modules

    def by_path(self) -> Mapping[str, torch.nn.Module]:
        """Return all modules by path. The method may be called before the loop begins."""
        return named_modules(self.chunks)

    def by_name(self) -> Mapping[str, torch.nn.Module]:
        """Return all modules by name, after reading the structure again."""
        self.named()
        return self._look().modules

    def tensors(self) -> Named:
        """Return this rank's part of each tensor, live. Raises SnapshotError for a tensor that can't be saved."""
        parameters, buffers = self.named()
        named = here = parameters | buffers
        if all_ordinary(named):
            self.buffers = frozenset(buffers)
        else:
            apart = ordinary(buffers, _buffer)
            self.buffers = frozenset(apart)
            here = ordinary(parameters, _parameter) | apart
        for name, tensor in here.items() if self._stale else ():
            refuse(_buffer(name) if name in self.buffers else _parameter(name), tensor)
        self._made = list(map(_MADE, named.values()))
        self._trained = [n for n, (_, _, trained) in zip(parameters, self._made, strict=False) if trained]
        return here

    def parameters(self, collected: Nested) -> list[torch.Tensor]:
        """Return the parameters in the last `collected` state."""
        return [each for name, each in collected.items() if name not in self.buffers and name[:1] != "."]

    def judged(self, collected: Nested) -> list[torch.Tensor]:
        """Return the parameters in the last `collected` state that must be finite: those that are trained and were finite when the loop
        began."""
        names = (name for name in self._trained if name in collected and name not in self._unjudged)
        return [collected[name] for name in names]

    def excuse(self) -> None:
        """Exempt parameters that are not finite when the loop begins: the script set them so on purpose, such as a padding row of NaN."""
        tensors = self.tensors()
        with torch.no_grad():
            self._unjudged = frozenset(
                n for n in self._trained if n in tensors and not finite(sums([tensors[n].detach()]))
            )

    def shard_again(self) -> None:
        """Shard the parameters that FSDP2 has left gathered (`sources.shard_again`)."""
        self._names.shard_again()

    @property
    def gathered(self) -> bool:
        """Whether the forward pass gathers the parameters, and thus writes all parameters, not only the buffers."""
        return any(getattr(getattr(c, "ddp_config", None), "overlap_param_gather", False) for c in self.chunks)

    def steady(self, collected: Nested, stepped: Collection[int]) -> list[torch.Tensor]:
        """Return the tensors in the last `collected` state that only an optimizer's step writes. stepped: ids of the optimizers'
        parameters. Megatron's optimizers step copies of the parameters, and FSDP's step parts of a FlatParameter."""
        if self.gathered:
            return []
        copied = any(hasattr(chunk, "ddp_config") for chunk in self.chunks)
        found = []
        for name, parameter in self.named()[0].items():
            otherwise = copied or type(parameter).__name__ == "FlatParameter"
            if name in collected and (id(parameter) in stepped or (otherwise and parameter.requires_grad)):
                found.append(collected[name])
        return found

    def collect(self) -> Nested:
        kept = self.tensors()
        outline = self._look()
        strides = [each.stride() for each in kept.values() if each.ndim > 1]
        seen = [*self._made, strides, [module.training for module in self._names.modules]]
        if seen != self._seen:
            self._seen, self._changes = seen, outline.changes() | ({BOUND: True} if self.bound else {})
        more = {CHANGED: self._changes, EXTRA: self._extra.collect(), ATTRIBUTES: self._attributes.collect()}
        return kept | {key: value for key, value in more.items() if value}

    def prepare(self, described: Nested) -> None:
        live, outline = self.tensors(), self._look()
        told = described.get(CHANGED, {})
        if self.bound and not told.get(BOUND):  # otherwise the Session has already put back the module objects
            outline.put_back(outline.began)
            live, outline = self.tensors(), self._look()
        pieces: dict[str, Piece] = {name: piece for name, piece in described.items() if name[:1] != "."}
        free = outline.may_change(told)
        odd = [f"{name}: only the snapshot holds it" for name in sorted(pieces.keys() - live.keys() - free)]
        odd += [f"{name}: only this run has it" for name in sorted(live.keys() - pieces.keys() - free)]
        odd += [why for n in live if n in pieces and n not in free and (why := misfit(n, live[n], pieces[n]))]
        if odd:
            more = f", and so on ({len(odd)} tensors)" if len(odd) > _NAMED else ""
            raise LayoutError(
                f"{', '.join(odd[:_NAMED])}{more}; the snapshot was taken with another model or another parallel layout"
            )
        outline.follow(told, pieces)

    def follow(self, described: Nested) -> None:
        """Set flags and modes from a snapshot of another layout. Raises LayoutError if a tensor's shape changed during that training."""
        told = described.get(CHANGED, {})
        if changed := [
            name for name, (began, now, *_) in told.get("tensors", {}).items() if not same_shape(began, now)
        ]:
            raise LayoutError(
                f"{min(changed)} has changed its shape during the training: such a state can be restored only in the same layout"
            )
        self.tensors()
        self._look().follow({key: value for key, value in told.items() if key != "tensors"}, {})

    def objects(self) -> Objects:
        """Return the objects that made up the modules when their structure was last read."""
        return self._look().now

    def put_back(self, objects: Objects) -> None:
        """Put the recorded objects back into the modules."""
        self.named()
        if self.objects() != objects:
            self._look().put_back(objects)

    def restore(self, kept: Nested) -> None:
        for name, tensor in self.tensors().items():
            put(tensor, kept[name])
        for parameter in self.named()[0].values():
            forget_copies(parameter)
        self._look()
        self._attributes.restore(kept.get(ATTRIBUTES, {}))
        self._extra.restore(kept.get(EXTRA, {}))

    def _look(self) -> Outline:
        """Return the modules' structure, which is read again if the modules have changed."""
        if self._outline is None:
            self._outline = Outline(self.chunks)
            self._attributes = Attributes(self._outline.modules, self._lenders, self._name)
        elif self._stale:
            otherwise = self._outline.look()
            self.bound = otherwise and (
                f"the modules have changed since the loop began ({otherwise}). A restart creates them as at the beginning. To have all of "
                "them at the start, create them before the Session"
            )
        if self._stale:
            self._extra = Extra(self._outline.modules)
            self._attributes.look(self._outline.modules)
            self._seen, self._stale = [], False
        return self._outline
