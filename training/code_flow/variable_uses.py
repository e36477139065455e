"""Lists what each byte code instruction does with variables and their parts. This module simulates Python's stack, but only for variables
and parts."""

from __future__ import annotations

import dis
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

Path = tuple[Any, ...]
"""The name of a variable, then (".", attribute) or ("[", key) for each nested part."""
ALL = ("[", "…")
"""Stands for all parts of an object."""
SOME = ("[", "?")
"""Stands for a part that the code does not name."""
_EMPTIES = frozenset(("clear", "reset", "zero_", "fill", "fill_", "copy_", "normal_", "uniform_"))
"""Methods that discard all former content of their object."""
CHANGING_FUNCTIONS = frozenset(
    ("next", "heappush", "heappop", "heappushpop", "heapreplace", "heapify", "insort", "shuffle")
)
"""Python's functions that change their first argument."""
_CALL = "PRECALL" if sys.version_info < (3, 12) else "CALL"
ALWAYS_JUMPS = frozenset(("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT"))
ENDS = frozenset(("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE"))
_PASSIVE = re.compile(r"POP_|STORE_|DELETE_|NOP|RESUME|KW_NAMES|NOT_TAKEN|.*JUMP|.*_(APPEND|ADD|EXTEND|UPDATE|MERGE)$")
"""Instructions that leave the stack unchanged below the values that they pop."""
JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))


class _Constant(NamedTuple):
    value: Any


class Use(NamedTuple):
    path: Path
    reads: bool = False
    sets: bool = False
    method: str | None = None
    anew: bool = True


def uses_of(known: Sequence[dis.Instruction], targets: Mapping[int, int]) -> dict[int, list[Use]]:
    """Return, by offset, what each instruction does with variables and their parts."""
    stacks: dict[int, list[Any]] = {}
    found: dict[int, list[Use]] = {}
    stack: list[Any] = []
    goes_on = True
    for each in known:
        if not goes_on:
            stack = stacks.get(each.offset, [])
        if each.offset in targets:
            stacks.setdefault(targets[each.offset], _moved([*stack], each, jump=True))
        found[each.offset] = [*_step(stack, each)]
        goes_on = each.opname not in ENDS | ALWAYS_JUMPS
    return found


def _moved(stack: list[Any], each: dis.Instruction, jump: bool = False) -> list[Any]:
    """Return the stack after an instruction of which only the number of popped and pushed values is known."""
    effect = dis.stack_effect(each.opcode, each.arg if each.opcode >= dis.HAVE_ARGUMENT else None, jump=jump)
    if effect > 0:
        stack += [None] * effect
        return stack
    del stack[max(0, len(stack) + effect) :]
    if stack and not _PASSIVE.match(each.opname):
        stack[-1] = None
    return stack


def _step(stack: list[Any], each: dis.Instruction) -> Iterator[Use]:
    """Yield what an instruction does with variables. Pops its values from the stack and pushes its results."""
    name, argument = each.opname, each.argval
    if variables := [*variables_in(each)]:
        for access, variable in variables:
            if access == "LOAD":
                yield Use((variable,), reads=True)
                stack.append((variable,))
            elif access == "STORE":
                yield Use((variable,), sets=True, anew=_taken(stack) != (variable,))
            else:
                yield Use((variable,), sets=True, method="del")
        if "NULL" in each.argrepr:  # a function that is to be called
            stack.append(stack[-1])
    elif name in ("LOAD_CONST", "LOAD_SMALL_INT"):
        stack.append(_Constant(argument))
    elif name == "PUSH_NULL":  # before the called function, or, in Python 3.13, after it
        stack.append(stack[-1] if stack else None)
    elif name == "COPY":
        stack.append(stack[-each.arg] if each.arg and len(stack) >= each.arg else None)
    elif name == "SWAP" and each.arg:
        stack[:0] = [None] * (each.arg - len(stack))
        stack[-1], stack[-each.arg] = stack[-each.arg], stack[-1]
    elif name == "BINARY_OP" and each.argrepr.endswith("="):
        _taken(stack)  # the result is the left operand
    elif name == "BUILD_SLICE" and stack[-2:] == [_Constant(None)] * 2 and each.arg == 2:
        stack[-2:] = [_Constant(...)]
    elif name.startswith("UNPACK_"):
        _taken(stack)
        stack += [None] * (1 + dis.stack_effect(each.opcode, each.arg))
    else:
        yield from _of_parts(stack, each)


def _of_parts(stack: list[Any], each: dis.Instruction) -> Iterator[Use]:
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
                yield Use(stack[-1], reads=True)
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
        if name == _CALL:
            yield from _called(stack, each.arg or 0)
        _moved(stack, each)


def _called(stack: Sequence[Any], arguments: int) -> Iterator[Use]:
    if not 0 < arguments < len(stack):
        return
    first, function = stack[-arguments], stack[-arguments - 1]
    if _is_path(function) and _is_path(first):
        name = function[-1][1] if len(function) > 1 else function[0]
        if name in CHANGING_FUNCTIONS:
            yield Use((*first, ALL), reads=True, method=name)


def _attribute(stack: list[Any], each: dis.Instruction) -> Iterator[Use]:
    owner, name = _taken(stack), each.argval
    called = dis.stack_effect(each.opcode, each.arg) == 1
    stack += [(*owner, (".", name)) if _is_path(owner) else None] * (2 if called else 1)
    if not _is_path(owner):
        return
    if not called:
        yield Use((*owner, (".", name)), reads=True)
    elif name in _EMPTIES:
        yield Use((*owner, ALL), sets=True)
    else:
        yield Use((*owner, ALL), reads=True, method=name)


def _set(owner: Any, step: tuple[str, Any], value: Any) -> Iterator[Use]:
    if not _is_path(owner):
        return
    if step == SOME:
        yield Use((*owner, ALL), reads=True, method="__setitem__")
    else:
        yield Use((*owner, step), sets=True, anew=value != (*owner, step))


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


def variables_in(instruction: dis.Instruction) -> Iterator[tuple[str, str]]:
    """Yield each access and its variable. Python 3.13 has instructions for two variables each, such as STORE_FAST_LOAD_FAST."""
    if instruction.opname == "LOAD_FAST_AND_CLEAR":  # around a comprehension that has a variable of this name
        return
    words = [word for word in instruction.opname.split("_") if word in ("LOAD", "STORE", "DELETE")]
    names = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
    if instruction.opname.partition("_")[2].startswith(("FAST", "NAME", "GLOBAL", "DEREF")):
        yield from ((word, name) for word, name in zip(words, names, strict=False) if isinstance(name, str))
