"""Finds the variables that a loop carries from one step to the next, or a function from one call to the next. The code changes such a
variable, and may read it in a step before it sets it in that step.

The analysis follows the byte code and its jumps, and tracks which variables are certainly set before each instruction. The analysis skips
exception handlers.
"""

from __future__ import annotations

import dis
import functools
import itertools
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import CodeType
from typing import NamedTuple

from .variable_uses import ALL, ALWAYS_JUMPS, CHANGING_FUNCTIONS, ENDS, JUMPS, Path, Use, uses_of, variables_in

_CHANGES = frozenset(
    (
        *("append", "appendleft", "extend", "extendleft", "insert", "pop", "popleft", "popitem", "remove", "sort"),
        *("reverse", "rotate", "add", "discard", "update", "setdefault", "subtract", "__setitem__"),
    )
)
"""Methods that change lists, sets, mappings and the like."""
_FLAGS = frozenset(("requires_grad_", "share_memory_", "detach_"))


class Carried(NamedTuple):
    path: Path
    """The variable, and the attributes or keys that lead to the part. The path ends with ALL if a method is called, or if the code sets a
    part that it does not name."""
    method: str | None
    anew: bool
    """Whether the code assigns another object. False if an operator such as `+=` changes the object in place and assigns the same object
    again."""

    @property
    def fills(self) -> bool:
        """Whether the method is one that changes containers or tensors."""
        name = self.method or ""
        in_place = name.endswith("_") and not name.endswith("__") and name not in _FLAGS
        return in_place or name in _CHANGES or name in CHANGING_FUNCTIONS


def carried_in(code: CodeType, at: int = -1) -> list[Carried]:
    """Return the variables that a loop may carry from one step to the next. at: the offset of the loop's FOR_ITER; -1: return what the
    whole code carries from one call to the next."""
    body, targets, uses = _looked_at(code, at)
    return _flowed(body, at, targets, uses) if body else []


def carried_from_outside(code: CodeType, defaults: Collection[str] = ()) -> list[Carried]:
    """Return the outer variables that a function, or a function inside it, carries from one call to the next. defaults: its parameters
    whose default is the same object at each call; they count as outer."""
    own = {*code.co_varnames, *code.co_cellvars}.difference(defaults)
    found = [each for each in carried_in(code) if each.path[0] not in own]
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            found += (each for each in carried_from_outside(inner) if each.path[0] not in code.co_cellvars)
    return found


def enumerated_in(code: CodeType, at: int) -> str | None:
    """Return the variable in which a loop over `enumerate(…)` counts its steps, if the loop's body reads it; otherwise None. at: the offset
    of the loop's FOR_ITER. The count begins anew with each loop."""
    known = [each for each in dis.get_instructions(code) if each.opname != "EXTENDED_ARG"]
    head = next((place for place, each in enumerate(known) if each.offset == at and each.opname == "FOR_ITER"), 0)
    if not any(each.argval == "enumerate" for each in _iterable_of(known[:head])):
        return None
    targets = itertools.dropwhile(lambda each: each.opname == "UNPACK_SEQUENCE", known[head + 1 :])
    variable = next((name for access, name in variables_in(next(targets)) if access == "STORE"), None)
    return variable if any(path[0] == variable for path, _ in named_in(code, at)) else None


def _iterable_of(header: Sequence[dis.Instruction]) -> Iterator[dis.Instruction]:
    """Yield the instructions that compute what the loop iterates over, the last first. header: the instructions before FOR_ITER. The first
    instruction of the expression is the one before which the stack has one value less than at the end."""
    missing = 1
    for each in reversed(header[:-1]):  # without GET_ITER
        if missing <= 0:
            return
        yield each
        missing -= dis.stack_effect(each.opcode, each.arg if each.opcode >= dis.HAVE_ARGUMENT else None, jump=False)


def named_in(code: CodeType, at: int = -1) -> Iterator[tuple[Path, str]]:
    """Yield each variable or part that the loop, or the whole code, reads, with the method that it calls there (else ""). Functions inside
    the code are included."""
    body, _, uses = _looked_at(code, at)
    for each in body:
        yield from (
            (use.path[:-1] if use.method else use.path, use.method or "") for use in uses[each.offset] if use.reads
        )
        if each.opname == "LOAD_CONST" and isinstance(each.argval, CodeType):
            yield from named_in(each.argval)


def set_anew_in(code: CodeType, at: int = -1) -> set[Path]:
    """Return the variables and parts that the loop, or the whole code, binds to other objects."""
    body, _, uses = _looked_at(code, at)
    return {use.path for each in body for use in uses[each.offset] if use.sets and use.method is None and use.anew}


def _looked_at(code: CodeType, at: int) -> tuple[list[dis.Instruction], dict[int, int], Mapping[int, Sequence[Use]]]:
    """Return the instructions, the targets of their jumps, and what each instruction does with variables."""
    known, begins, real = [], {}, 0
    for each in dis.get_instructions(code):
        begins[each.offset] = real = real or each.offset
        if each.opname != "EXTENDED_ARG":
            known.append(each)
            real = 0
    starts = {begins[each.offset]: each.offset for each in known}
    targets = {each.offset: starts.get(each.argval, each.argval) for each in known if each.opcode in JUMPS}
    end = next((each.argval for each in known if each.offset == at and each.opname == "FOR_ITER"), at)
    return [each for each in known if at < each.offset < end or at < 0], targets, uses_of(known, targets)


def _flowed(
    body: Sequence[dis.Instruction], at: int, targets: Mapping[int, int], found: Mapping[int, Sequence[Use]]
) -> list[Carried]:
    """Return the variables that the instructions carry. An inner loop is assumed to run at least once."""
    uses = [found[each.offset] for each in body]
    bits: dict[Path, int] = {}
    for path in (use.path[:length] for each in uses for use in each for length in range(1, len(use.path) + 1)):
        bits.setdefault(path, 1 << len(bits))
    masks = {path: _mask(path, bits) for path in bits}
    sets = [functools.reduce(int.__or__, (bits[use.path] for use in each if use.sets), 0) for each in uses]
    states, last = _settled(body, at, targets, sets, (1 << len(bits)) - 1)
    carried: dict[tuple[Path, str | None], None] = {}
    anew: dict[Path, bool] = defaultdict(bool)
    kept = set()
    """Parts that are set, but not in each step."""
    for state, each in zip(states, uses, strict=True):
        for use in each:
            if use.reads and not state & masks[use.path]:
                carried[use.path, use.method] = None
            if use.sets:
                if use.method is None:
                    anew[use.path] |= use.anew
                    if (
                        len(use.path) > 1
                        and use.path[-1] != ALL
                        and not (state & masks[use.path[:-1]] or last & masks[use.path])
                    ):
                        kept.add(use.path)
                        carried[use.path, None] = None
                state |= bits[use.path]
    return [
        Carried(path, method, anew[path])
        for path, method in carried
        if method is not None or path in anew or path in kept
    ]


def _mask(path: Path, bits: Mapping[Path, int]) -> int:
    """Return the bits of a path and of all paths that contain it."""
    around = [path[:length] for length in range(1, len(path) + 1)]
    return sum(bits.get(each, 0) for each in {*around, *((*each, ALL) for each in around[:-1])})


def _settled(
    body: Sequence[dis.Instruction], at: int, targets: Mapping[int, int], sets: Sequence[int], every: int
) -> tuple[list[int], int]:
    """Return the bits of the paths that are surely set before each instruction, and at the end of a step."""
    places = {each.offset: place for place, each in enumerate(body)}
    to = {place: places.get(targets[each.offset]) for place, each in enumerate(body) if each.offset in targets}
    repeated = {target for place, target in to.items() if target is not None and target <= place}
    ahead, back, last = [every] * len(body), [every] * len(body), every
    ahead[0] = 0
    waiting = [0]
    while waiting:
        place = waiting.pop()
        each = body[place]
        after = ahead[place] & back[place] | sets[place]
        following = [] if each.opname in ENDS | ALWAYS_JUMPS else [(place + 1, after)]
        if (target := to.get(place)) is not None:
            following.append((target, back[place] if each.opname == "FOR_ITER" and place in repeated else after))
        if each.opname.startswith("RETURN") if at < 0 else targets.get(each.offset, at + 1) <= at:
            last &= after
        for target, state in following:
            into = back if target <= place else ahead
            if target < len(body) and state & into[target] != into[target]:
                into[target] &= state
                waiting.append(target)
    return [one & other for one, other in zip(ahead, back, strict=True)], last
