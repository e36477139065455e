"""Variables of the script's own, around its training loop.

Random generators in them are kept, by the names of the variables. What else the loop carries from step to step no snapshot holds: that is
named once. Which variables these are follows from the loop's code: it reads them before it sets them.
"""

from __future__ import annotations

import dis
import inspect
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch

from ...checkpoint.format.pytree_walk import PLAIN
from ...resilience.clock import monotonic_s, wall_s
from ..data.held_values import GENERATORS, OF_THE_RANK
from ..data.script_code import installed, is_own
from ..state.tensors.in_place import Nested
from ..state.values.value_source import Known, Values

_MOST = 64
"""Generators: some kB each, in each snapshot."""
_PYTHONS = (os.path.dirname(os.__file__), str(Path(__file__).parents[2]))
"""Where most modules are from. To ask of each whether it is installed takes 20 ms."""
_CLOCKS = (wall_s, monotonic_s, time.perf_counter)
_JUST_NOW_S = 60.0
"""What a clock gave so lately is a time that the loop measures from."""


class Generators:
    """Those in variables of the script, as a source of state of this rank alone."""

    def __init__(self) -> None:
        self._found: dict[str, Any] = {}
        self._source = Values("the script's generators", self._found, Known())
        self._kept: Nested | None = None

    def look(self, frame: FrameType | None) -> None:
        """When the loop begins. frame: what asks for its first step."""
        for name, generator in _generators(frame):
            if len(self._found) < _MOST and not any(generator is each for each in self._found.values()):
                self._found.setdefault(name, generator)

    def collect(self) -> Nested:
        return self._source.collect()

    def restore(self, kept: Nested) -> None:
        """`put_back` has to follow."""
        self._kept = kept

    def put_back(self) -> None:
        """Once the data is where it was: a loader may have drawn on its way there."""
        if self._kept is not None:
            self._source.restore(self._kept)
            self._kept = None


def moved_on(frame: FrameType | None) -> list[str]:
    """Variables that the loop of the script takes from one step to the next, and no snapshot holds."""
    while frame is not None and not _of_script(frame):
        frame = frame.f_back
    if frame is None:
        return []
    around = {**frame.f_globals, **_variables(frame)}
    return [name for name in _carried(frame.f_code, frame.f_lasti) if name in around and _is_state(around[name])]


def _is_state(value: Any) -> bool:
    if isinstance(value, float) and any(0 <= clock() - value < _JUST_NOW_S for clock in _CLOCKS):
        return False
    return type(value) in PLAIN or isinstance(value, (torch.Tensor, np.ndarray, tuple))


def _carried(code: CodeType, at: int) -> list[str]:
    """What the loop whose iterator is asked at the offset `at` reads before it sets it, and sets."""
    known = list(dis.get_instructions(code))
    end = next((each.argval for each in known if each.offset == at and each.opname == "FOR_ITER"), at)
    reads: dict[str, bool] = {}
    """Whether it is read first."""
    sets = set()
    for each in known:
        if not at < each.offset < end:
            continue
        for access, name in _accesses(each):
            reads.setdefault(name, access == "LOAD")
            if access == "STORE":
                sets.add(name)
    return [name for name, first in reads.items() if first and name in sets]


def _accesses(instruction: dis.Instruction) -> Iterator[tuple[str, str]]:
    """Python 3.13 has instructions for two variables each: STORE_FAST_LOAD_FAST."""
    words = [word for word in instruction.opname.split("_") if word in ("LOAD", "STORE")]
    names = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
    if instruction.opname.partition("_")[2].startswith(("FAST", "NAME", "GLOBAL", "DEREF")):
        yield from ((word, name) for word, name in zip(words, names, strict=False) if isinstance(name, str))


def _generators(frame: FrameType | None) -> Iterator[tuple[str, Any]]:
    for name, variables in _scopes(frame):
        for variable, value in variables.items():
            if _draws(value):
                yield f"{name}.{variable}", value
            elif is_own(value):
                parts: Mapping[str, Any] = getattr(value, "__dict__", {})
                yield from ((f"{name}.{variable}.{at}", part) for at, part in parts.items() if _draws(part))


def _scopes(frame: FrameType | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Functions that have begun and not ended, the innermost first, then modules: of the script."""
    while frame is not None:
        if _of_script(frame) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            yield frame.f_code.co_qualname, _variables(frame)
        frame = frame.f_back
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and not file.startswith(_PYTHONS) and "-packages" not in file and not installed(file):
            yield name, vars(module)


def _variables(frame: FrameType) -> dict[str, Any]:
    held = frame.f_locals
    found = dict(held)
    if frame.f_code.co_flags & inspect.CO_OPTIMIZED and sys.version_info < (3, 13):
        held.clear()  # it stays with the frame, and would keep what the script lets go
    return found


def _of_script(frame: FrameType) -> bool:
    return not installed(frame.f_globals.get("__file__"))


def _draws(value: Any) -> bool:
    """Whether it is a generator that a snapshot can hold, and not one of the rank's."""
    if type(value) not in GENERATORS or any(value is each for each in OF_THE_RANK):
        return False
    return type(value) is not np.random.Generator or type(value.bit_generator).__module__.startswith("numpy.")


def sentence(names: Sequence[str]) -> str:
    return (
        f"the loop carries variables from step to step that no snapshot holds: {', '.join(names)}. After a restart they begin with their "
        "first values. If the training depends on one of them, keep it in a mapping that the Session is given: "
        f'state = {{"{names[0]}": …}}; Session(…, state=state)'
    )
