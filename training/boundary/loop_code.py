"""What a loop takes from one step to the next, by its byte code: what it may read before it has set it in this step, and what it changes.

The stack is followed as far as it has variables and their parts; then forward, over the jumps, what each instruction can be sure is set.
Handlers of exceptions are left out.
"""

from __future__ import annotations

import dis
import functools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType
from typing import Any, NamedTuple

Path = tuple[Any, ...]
"""The name of a variable, then (".", attribute) or ("[", key) of its parts."""
ALL = ("[", "…")
"""All parts of a thing."""
SOME = ("[", "?")
"""One that the code does not name."""
_EMPTIES = frozenset(("clear", "reset", "zero_", "fill", "fill_", "copy_", "normal_", "uniform_"))
"""Methods that leave nothing of before."""
_ALWAYS_JUMPS = frozenset(("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT"))
_ENDS = frozenset(("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE"))
_PASSIVE = re.compile(r"POP_|STORE_|DELETE_|NOP|RESUME|KW_NAMES|NOT_TAKEN|.*JUMP|.*_(APPEND|ADD|EXTEND|UPDATE|MERGE)$")
"""What lies beneath what they take from the stack stays what it is."""
_JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))


class Carried(NamedTuple):
    path: Path
    """Ends with ALL where a method is called, or a part is set that the code does not name."""
    method: str | None
    anew: bool
    """Another object is set: not the very one that an operator has changed in place."""


class _Constant(NamedTuple):
    value: Any


class _Use(NamedTuple):
    path: Path
    reads: bool = False
    sets: bool = False
    method: str | None = None
    anew: bool = True


def carried_in(code: CodeType, at: int = -1) -> list[Carried]:
    """What the loop whose iterator is asked at the offset `at` may take from one step to the next; -1: what the code as a whole takes from
    one call to the next."""
    known, begins, real = [], {}, 0
    for each in dis.get_instructions(code):
        begins[each.offset] = real = real or each.offset
        if each.opname != "EXTENDED_ARG":
            known.append(each)
            real = 0
    starts = {begins[each.offset]: each.offset for each in known}
    targets = {each.offset: starts.get(each.argval, each.argval) for each in known if each.opcode in _JUMPS}
    end = next((each.argval for each in known if each.offset == at and each.opname == "FOR_ITER"), at)
    body = [each for each in known if at < each.offset < end or at < 0]
    return _flowed(body, at, targets, _uses(known, targets)) if body else []


def _flowed(
    body: Sequence[dis.Instruction], at: int, targets: Mapping[int, int], found: Mapping[int, Sequence[_Use]]
) -> list[Carried]:
    """An inner loop counts as gone through at least once."""
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
    """Of it and what it is part of."""
    around = [path[:length] for length in range(1, len(path) + 1)]
    return sum(bits.get(each, 0) for each in {*around, *((*each, ALL) for each in around[:-1])})


def _settled(
    body: Sequence[dis.Instruction], at: int, targets: Mapping[int, int], sets: Sequence[int], every: int
) -> tuple[list[int], int]:
    """What is sure to be set before each instruction, and at the end of a step."""
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
        following = [] if each.opname in _ENDS | _ALWAYS_JUMPS else [(place + 1, after)]
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


def _uses(known: Sequence[dis.Instruction], targets: Mapping[int, int]) -> dict[int, list[_Use]]:
    """By offset, what each instruction does with variables and their parts."""
    stacks: dict[int, list[Any]] = {}
    found: dict[int, list[_Use]] = {}
    stack: list[Any] = []
    goes_on = True
    for each in known:
        if not goes_on:
            stack = stacks.get(each.offset, [])
        if each.offset in targets:
            stacks.setdefault(targets[each.offset], _moved([*stack], each, jump=True))
        found[each.offset] = [*_step(stack, each)]
        goes_on = each.opname not in _ENDS | _ALWAYS_JUMPS
    return found


def _moved(stack: list[Any], each: dis.Instruction, jump: bool = False) -> list[Any]:
    """After an instruction of which only the number of values is known that it takes and gives."""
    effect = dis.stack_effect(each.opcode, each.arg if each.opcode >= dis.HAVE_ARGUMENT else None, jump=jump)
    if effect > 0:
        stack += [None] * effect
        return stack
    del stack[max(0, len(stack) + effect) :]
    if stack and not _PASSIVE.match(each.opname):
        stack[-1] = None
    return stack


def _step(stack: list[Any], each: dis.Instruction) -> Iterator[_Use]:
    """What an instruction does, which takes its values from the stack and puts others there."""
    name, argument = each.opname, each.argval
    if variables := [*_variables(each)]:
        for access, variable in variables:
            if access == "LOAD":
                yield _Use((variable,), reads=True)
                stack.append((variable,))
            elif access == "STORE":
                yield _Use((variable,), sets=True, anew=_taken(stack) != (variable,))
            else:
                yield _Use((variable,), sets=True, method="del")
        if "NULL" in each.argrepr:  # a function that is to be called
            stack[-1:] = [None, None]
    elif name in ("LOAD_CONST", "LOAD_SMALL_INT"):
        stack.append(_Constant(argument))
    elif name == "COPY":
        stack.append(stack[-each.arg] if each.arg and len(stack) >= each.arg else None)
    elif name == "SWAP" and each.arg:
        stack[:0] = [None] * (each.arg - len(stack))
        stack[-1], stack[-each.arg] = stack[-each.arg], stack[-1]
    elif name == "BINARY_OP" and each.argrepr.endswith("="):
        _taken(stack)  # what is on the left is the result
    elif name == "BUILD_SLICE" and stack[-2:] == [_Constant(None)] * 2 and each.arg == 2:
        stack[-2:] = [_Constant(...)]
    elif name.startswith("UNPACK_"):
        _taken(stack)
        stack += [None] * (1 + dis.stack_effect(each.opcode, each.arg))
    else:
        yield from _of_parts(stack, each)


def _of_parts(stack: list[Any], each: dis.Instruction) -> Iterator[_Use]:
    name = each.opname
    if name in ("LOAD_ATTR", "LOAD_METHOD"):
        yield from _attribute(stack, each)
    elif name == "STORE_ATTR":
        owner, value = _taken(stack), _taken(stack)
        yield from _set(owner, (".", each.argval), value)
    elif name == "BINARY_SUBSCR" or (name == "BINARY_OP" and each.argrepr == "[]"):
        step, owner = _key(_taken(stack)), _taken(stack)
        if _is_path(owner):
            stack.append((*owner, step))
            if step not in (ALL, SOME):
                yield _Use(stack[-1], reads=True)
        else:
            stack.append(None)
    elif name in ("STORE_SUBSCR", "DELETE_SUBSCR"):
        step, owner = _key(_taken(stack)), _taken(stack)
        value = _taken(stack) if name == "STORE_SUBSCR" else None
        yield from _set(owner, step if name == "STORE_SUBSCR" else SOME, value)
    elif name == "STORE_SLICE":
        bounds = _taken(stack), _taken(stack)
        owner, value = _taken(stack), _taken(stack)
        yield from _set(owner, ALL if bounds == (_Constant(None), _Constant(None)) else SOME, value)
    else:
        _moved(stack, each)


def _attribute(stack: list[Any], each: dis.Instruction) -> Iterator[_Use]:
    owner, name = _taken(stack), each.argval
    called = dis.stack_effect(each.opcode, each.arg) == 1
    stack += [None, None] if called else [(*owner, (".", name)) if _is_path(owner) else None]
    if not _is_path(owner):
        return
    if not called:
        yield _Use((*owner, (".", name)), reads=True)
    elif name in _EMPTIES:
        yield _Use((*owner, ALL), sets=True)
    else:
        yield _Use((*owner, ALL), reads=True, method=name)


def _set(owner: Any, step: tuple[str, Any], value: Any) -> Iterator[_Use]:
    if not _is_path(owner):
        return
    if step == SOME:
        yield _Use((*owner, ALL), reads=True, method="__setitem__")
    else:
        yield _Use((*owner, step), sets=True, anew=value != (*owner, step))


def _key(key: Any) -> tuple[str, Any]:
    if not isinstance(key, _Constant) or not isinstance(key.value, (str, int, type(...), slice)):
        return SOME
    if isinstance(key.value, slice) and key.value != slice(None):
        return SOME
    return ("[", key.value) if isinstance(key.value, (str, int)) else ALL


def _taken(stack: list[Any]) -> Any:
    return stack.pop() if stack else None


def _is_path(symbol: Any) -> bool:
    return isinstance(symbol, tuple) and not isinstance(symbol, _Constant)


def _variables(instruction: dis.Instruction) -> Iterator[tuple[str, str]]:
    """Python 3.13 has instructions for two variables each: STORE_FAST_LOAD_FAST."""
    if instruction.opname == "LOAD_FAST_AND_CLEAR":  # around a comprehension, which has a variable of this name
        return
    words = [word for word in instruction.opname.split("_") if word in ("LOAD", "STORE", "DELETE")]
    names = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
    if instruction.opname.partition("_")[2].startswith(("FAST", "NAME", "GLOBAL", "DEREF")):
        yield from ((word, name) for word, name in zip(words, names, strict=False) if isinstance(name, str))
