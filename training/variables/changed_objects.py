"""Finds objects in the script's variables that change in training and that no snapshot contains. Rank 0 names them in the log after the
first steps.

Examples are an average of the weights, a target network, an environment, or an optimizer that the Session was not given. The script's
variables keep the same objects all the time, and these objects change inside. If the byte code shows the change, `loop_variables.py` names
the objects at the start. For the other objects, rank 0 computes a mark (a hash of sampled content) of each object after step 1. Rank 0
compares the marks after a few more steps. Marks are computed from samples of each object, without calling code of the script.
"""

from __future__ import annotations

import functools
import hashlib
import io
import itertools
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from types import CodeType, FrameType, FunctionType, GeneratorType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ...checkpoint.format.pytree_walk import PLAIN
from ..code_flow.carried import carried_in, set_anew_in
from ..code_flow.variable_uses import Path
from ..data.script_code import is_own, methods
from ..state.modules.attribute_rules import WRAPPERS
from ..state.values.kind import slots_of
from .saved_objects import Saved
from .script_objects import attributes, ends_of, for_the_eye, is_no_state, part_at, scopes_of

_LOOKS = (3, 10, 100, 1000, 10_000, 100_000)
"""The steps after which the marks are compared. The later ones find a target network that is updated only every thousand steps."""
_EPOCHS = 3
"""The number of epochs at whose end the marks are compared too. A loop may update an average of the weights only there."""
_SAMPLES = 256
"""How many numbers of a tensor are read, and how many parts at either end of a list or mapping."""
_MOST = 3000
"""The most objects and numbers that are read within one variable."""
_MOST_OF_ALL = 100_000
"""The most objects and numbers that are read in all variables, which takes 0.1 s."""
_PLACES = 500
"""The most variables, and attributes of objects in them, that are marked."""
_HELD = 300_000
"""The most objects of the Session that are recognized. A module of torch's is about 20."""
_LEFT_ALONE = (
    *(type, ModuleType, FunctionType, CodeType, FrameType, GeneratorType, io.IOBase, threading.Thread),
    *(DataLoader, Dataset, Sampler, _BaseDataLoaderIter),
)
"""Classes of objects that contain no state of the training, or that are rewound with the data."""
_OURS = __package__.partition(".")[0]
_OF_MODULES = ("_parameters", "_buffers", "_modules")


class _Place(NamedTuple):
    anchor: Callable[[], int]
    """A function that returns the id of the object that must be the same at the next comparison; 0 if that object is gone. The function
    does not keep the object alive: a loss, for example, would keep its graph."""
    mark: bytes


class ChangedObjects:
    """Finds the objects that have changed in the variables of one rank's script."""

    def __init__(self) -> None:
        self._first: dict[str, _Place] = {}
        self._said: set[str] = set()
        self._steps = self._epoch = 0

    def stepped(
        self, frame: FrameType | None, held: Iterable[Any], named: Collection[str], epoch: int = 0
    ) -> list[str]:
        """Return the names of objects that have changed since step 1, each only once. Call this after each step. frame: the loop's frame.
        held: the objects that the Session saves. named: variables that were named before. epoch: the step's epoch."""
        self._steps += 1
        begins = self._epoch < epoch <= _EPOCHS
        self._epoch = max(self._epoch, epoch)
        if self._steps not in (1, *_LOOKS) and not begins:
            return []
        known, places = _Known(held), {}
        for name, anchor, value in _places(frame, known):
            if (mark := known.mark(value)) is not None:
                places[name] = _Place(_anchored(anchor), mark)
        if self._steps == 1:
            self._first = places
        self._said.update(named)
        changed = [
            name
            for name, place in places.items()
            if (first := self._first.get(name)) and first.anchor() == place.anchor() and first.mark != place.mark
        ]
        found = [name for name in changed if self._said.isdisjoint((name, name.partition(".")[0]))]
        self._said.update(found)
        if self._steps == _LOOKS[-1]:
            self._first = {}
        return found


def _anchored(thing: Any) -> Callable[[], int]:
    known = id(thing)
    if not _is_followed(thing):
        return lambda: known
    there = weakref.ref(thing)
    return lambda: known if there() is not None else 0


def _is_followed(thing: Any) -> bool:
    """Whether a weak reference can show that the object is gone. (Lists and mappings do not allow one, and a new list may get an earlier
    list's id.)"""
    return type(thing).__weakrefoffset__ != 0


class _Known:
    """The objects that the Session saves, and the memory of its tensors."""

    def __init__(self, held: Iterable[Any]) -> None:
        self.saved = Saved([*held], _HELD)
        tensors = (each for each in self.saved.things.values() if type(each) in (torch.Tensor, torch.nn.Parameter))
        self._memory = {_memory(each) for each in tensors} - {0}
        self._left = _MOST_OF_ALL

    def is_marked(self, value: Any) -> bool:
        """Whether marks cover an object: it may contain state of the script that the Session does not save."""
        kind: Any = type(value)
        if kind in PLAIN or issubclass(kind, _LEFT_ALONE) or is_no_state(value, self.saved.things):
            return False
        if kind.__module__.partition(".")[0] in (_OURS, *WRAPPERS) or kind.__module__.startswith("torch.nn.parallel"):
            return False
        return issubclass(kind, itertools.count) or not any("__next__" in vars(each) for each in kind.__mro__)

    def mark(self, value: Any) -> bytes | None:
        """Return a mark (a hash) of an object's content. Two marks differ if the samples that they cover have changed. None: the object
        cannot be read, or this comparison has reached its limit of objects."""
        told, seen = hashlib.blake2b(digest_size=16), 0
        waiting, met = deque([value]), set()
        with suppress(Exception):
            while waiting and seen < _MOST and self._left > 0:
                each = waiting.popleft()
                kind: Any = type(each)
                seen, self._left = seen + 1, self._left - 1
                if kind in PLAIN or issubclass(kind, (np.generic, itertools.count)):
                    told.update(f"{len(each)} {each[:200]!r}".encode() if kind in (str, bytes) else repr(each).encode())
                elif id(each) not in met and self.is_marked(each):
                    met.add(id(each))
                    if issubclass(kind, (torch.Tensor, np.ndarray)):
                        told.update(b"" if kind is torch.Tensor and _memory(each) in self._memory else _sample(each))
                    else:
                        waiting.extend(part for part in _parts(each) if not self.saved.has(each, part))
            return told.digest() if self._left > 0 else None
        return None


def _places(frame: FrameType | None, known: _Known) -> Iterator[tuple[str, Any, Any]]:
    """Yield each variable, and each attribute of a script's object: its name, its anchor object, and its value."""
    met: set[int] = set()
    for variables, rebound in scopes_of(frame):
        for name, value in [*variables.items()]:
            if len(met) >= _PLACES:
                return
            if name[:2] == "__" or for_the_eye(name, value) or id(value) in met or not known.is_marked(value):
                continue
            if name in rebound and not _is_followed(value):
                continue
            met.add(id(value))
            kind: Any = type(value)
            if issubclass(kind, torch.nn.Module) or not is_own(value):
                yield name, value, value
                continue
            for attribute, part in [*attributes(value).items()]:
                if type(part) in PLAIN:
                    if attribute in _gone_on_with(kind) and not known.saved.has(value, part):
                        yield f"{name}.{attribute}", value, part
                elif id(part) not in met and not for_the_eye(attribute, part) and known.is_marked(part):
                    met.add(id(part))
                    if _is_followed(part) or attribute not in _bound_anew(kind):
                        yield f"{name}.{attribute}", part, part


@functools.cache
def _bound_anew(kind: Any) -> frozenset[str]:
    """Return the attributes that a method other than `__init__` binds to another object."""
    codes = [function.__code__ for name, function in methods(kind) if not name.endswith(".__init__")]
    return frozenset(name for code in codes for path in set_anew_in(code) for name in _attribute_in(path, code))


@functools.cache
def _gone_on_with(kind: Any) -> frozenset[str]:
    """Return the attributes of which a method may read the value that an earlier call has assigned."""
    codes = [function.__code__ for _, function in methods(kind)]
    return frozenset(name for code in codes for each in carried_in(code) for name in _attribute_in(each.path[:2], code))


def _attribute_in(path: Path, code: CodeType) -> Iterator[str]:
    """Yield the attribute's name if the path is an attribute of a method's first parameter."""
    if code.co_argcount and len(path) == 2 and path[0] == code.co_varnames[0] and path[1][0] == ".":
        yield path[1][1]


def _parts(value: Any) -> list[Any]:
    kind: Any = type(value)
    if issubclass(kind, torch.nn.Module):
        return [attributes(value).get(name) for name in _OF_MODULES]
    length, ends = ends_of(value, _SAMPLES)
    if issubclass(kind, (set, frozenset)):
        return [length]
    slots = [part_at(value, (".", name)) for name in slots_of(kind)]
    return [length, *ends, *attributes(value).values(), *slots]


def _memory(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except Exception:  # a sparse or fake tensor, or a tensor class of another package
        return 0


def _sample(value: Any) -> bytes:
    """Return some numbers of an array or tensor, if its memory is contiguous and no file (reading the file would hold up the step)."""
    if isinstance(value, np.ndarray):
        if _maps_a_file(value):
            return b""
        flat = value.reshape(-1) if value.flags.c_contiguous and value.dtype != object else np.empty(0)
        return repr(value.shape).encode() + flat[:: max(1, flat.size // _SAMPLES)][: 2 * _SAMPLES].tobytes()
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout is not torch.strided or value.is_meta:
        return b""
    told = f"{value.shape} {value._version}".encode()
    freed = (
        value.untyped_storage().nbytes() < value.nbytes
    )  # its storage was resized: reading it would crash the process
    if not value.is_contiguous() or not value.numel() or freed:
        return told
    flat = value.detach().view(-1)
    some = flat[:: max(1, flat.numel() // _SAMPLES)][: 2 * _SAMPLES].cpu()
    return told + some.contiguous().view(torch.uint8).numpy().tobytes()


def _maps_a_file(array: Any) -> bool:
    while issubclass(type(array), (np.ndarray, memoryview)):
        array = array.base if issubclass(type(array), np.ndarray) else array.obj
    return issubclass(type(array), mmap.mmap)


def sentence(names: Sequence[str]) -> str:
    return (
        f"objects in these variables change in the training, and no snapshot contains them: {', '.join(names)}. After a restart they are "
        "as the script creates them. If the training depends on one of them, give it to the Session: "
        f"Session(…, {names[0].rpartition('.')[2]}={names[0]})"
    )
