"""The types of values that a snapshot can store besides tensors, arrays and plain containers.

Nothing is pickled or imported. A value that is stored by name must be in a module that the script itself has imported. `packing.py` uses
the table.
"""

from __future__ import annotations

import array
import datetime
import decimal
import fractions
import functools
import io
import ipaddress
import itertools
import pathlib
import random
import re
import types
import uuid
import zoneinfo
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from .kind import Kind, constant, fill_attributes, fill_pairs


def _as_text(kind: Any, name: str = "") -> Kind:
    return constant(name or kind.__name__, kind, str, kind)


def _of_state(kind: Any, make: Callable[[Any], Any], save: Callable[[Any], Any]) -> Kind:
    """Return the adapter for a type that is written in C and has `__setstate__`."""
    return Kind(kind.__name__, (kind,), save, make, lambda live, content: live.__setstate__(content))


def _fill_default(live: Any, content: Any) -> None:
    live.default_factory = content[0]
    fill_pairs(live, content[1])


def _fill_deque(live: Any, content: Any) -> None:
    deque.clear(live)
    deque.extend(live, content[1])


def _fill_set(live: Any, content: Any) -> None:
    set.clear(live)
    set.update(live, content)


def _fill_bytes(live: Any, content: Any) -> None:
    bytearray.__setitem__(live, slice(None), content)


def _fill_array(live: Any, content: Any) -> None:
    del live[:]
    live.frombytes(content[1])


def _date(value: Any) -> tuple[int, ...]:
    return value.year, value.month, value.day


def _time(value: Any) -> tuple[Any, ...]:
    return value.hour, value.minute, value.second, value.microsecond, value.tzinfo, value.fold


def _folded(kind: Any) -> Callable[[Any], Any]:
    return lambda content: kind(*content[:-1], fold=content[-1])


METHODS = (types.MethodType, types.BuiltinFunctionType)


def is_bound(thing: Any) -> bool:
    """Return whether the value is a method, written in C, of an object, such as `random.Random(3).random`."""
    if type(thing) is not types.BuiltinFunctionType:
        return False
    return not (thing.__self__ is None or isinstance(thing.__self__, (type, types.ModuleType)))


def _method(value: Any) -> Any:
    name = value.__name__
    if getattr(value.__self__, name, None) != value:
        raise ValueError(f"its object has another {name}")
    return value.__self__, name


def _bound(content: Any) -> Any:
    found = getattr(*content)
    if type(found) not in METHODS:
        raise ValueError(f"{content[1]!r} is not a method of a {type(content[0]).__qualname__}")
    return found


def _seeds(source: Any) -> Any:
    return source.entropy, source.spawn_key, source.pool_size, source.n_children_spawned


def _save_bits(value: Any) -> Any:
    return type(value).__name__, value.state, value.seed_seq if type(value.seed_seq) is np.random.SeedSequence else None


def _fill_bits(live: Any, content: Any) -> None:
    _, state, seeds = content
    live.__setstate__((state, seeds))


def _fill_generator(live: Any, content: Any) -> None:
    if live.bit_generator is not content[1]:
        live.__init__(content[1])


_BITS: dict[str, Any] = {
    each.__name__: each
    for each in (np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64)
}


descr: Any = np.lib.format.dtype_to_descr
dtype_of = np.lib.format.descr_to_dtype


@functools.cache
def describable(dtype: Any) -> bool:
    """Return whether `dtype_of` can rebuild the dtype, which fails, for example, for ml_dtypes' bfloat16."""
    return dtype_of(descr(dtype)) == dtype


def _scalar(content: Any) -> Any:
    return np.frombuffer(bytearray(content[1]), dtype_of(content[0]))[0]  # a structured scalar can be written to


def _torchs(kind: Any) -> Callable[[Any], Any]:
    def make(content: Any) -> Any:
        found = getattr(torch, content.removeprefix("torch."), None)
        if type(found) is not kind:
            raise ValueError(f"{content!r} is no {kind.__name__}")
        return found

    return make


def unpacked(content: Sequence[Any]) -> tuple[Any, ...]:
    version, words, gauss = content
    return version, tuple(words.tolist()), gauss


def packed(state: tuple[Any, ...]) -> tuple[int, np.ndarray[Any, Any], float | None]:
    """Return the state with Python's 625 words as one array. Each step walks the state, and an array is cheaper to walk than a tuple."""
    version, words, gauss = state
    return version, np.array(words, np.uint32), gauss


METHOD = constant("method", types.MethodType, _method, _bound)
_CONSTANTS = {"Ellipsis": ..., "NotImplemented": NotImplemented}

CHANGELESS = (
    constant("complex", complex, lambda v: (v.real, v.imag), lambda c: complex(*c)),
    constant("range", range, lambda v: (v.start, v.stop, v.step), lambda c: range(*c)),
    constant("slice", slice, lambda v: (v.start, v.stop, v.step), lambda c: slice(*c)),
    constant("constant", tuple(map(type, _CONSTANTS.values())), repr, _CONSTANTS.__getitem__),
    constant("frozenset", frozenset, tuple, frozenset),
    _as_text(decimal.Decimal),
    constant("Fraction", fractions.Fraction, lambda v: (v.numerator, v.denominator), lambda c: fractions.Fraction(*c)),
    constant("UUID", uuid.UUID, lambda v: v.hex, uuid.UUID),
    *map(_as_text, (pathlib.PosixPath, pathlib.PurePosixPath, pathlib.PureWindowsPath)),
    *map(_as_text, (ipaddress.IPv4Address, ipaddress.IPv4Interface, ipaddress.IPv4Network)),
    *map(_as_text, (ipaddress.IPv6Address, ipaddress.IPv6Interface, ipaddress.IPv6Network)),
    METHOD,
    constant("date", datetime.date, _date, lambda c: datetime.date(*c)),
    constant("datetime", datetime.datetime, lambda v: (*_date(v), *_time(v)), _folded(datetime.datetime)),
    constant("time", datetime.time, _time, _folded(datetime.time)),
    constant(
        "timedelta",
        datetime.timedelta,
        lambda v: (v.days, v.seconds, v.microseconds),
        lambda c: datetime.timedelta(*c),
    ),
    constant("timezone", datetime.timezone, lambda v: v.__getinitargs__(), lambda c: datetime.timezone(*c)),
    constant("ZoneInfo", zoneinfo.ZoneInfo, lambda v: v.key, zoneinfo.ZoneInfo),
    constant("pattern", re.Pattern, lambda v: (v.pattern, v.flags), lambda c: re.compile(*c)),
    constant("numpy.str_", np.str_, str, np.str_),
    constant("numpy.bytes_", np.bytes_, bytes, np.bytes_),
    constant("torch.Size", torch.Size, tuple, torch.Size),
    constant("torch.device", torch.device, str, torch.device),
    constant("torch.dtype", torch.dtype, str, _torchs(torch.dtype)),
    constant("torch.layout", torch.layout, str, _torchs(torch.layout)),
    constant("torch.memory_format", torch.memory_format, str, _torchs(torch.memory_format)),
)
NUMPY_SCALAR = constant("numpy scalar", (), lambda v: (descr(v.dtype), v.tobytes()), _scalar)
DTYPE = constant("numpy.dtype", (), descr, dtype_of)
RETURNED = constant(
    "torch.return_types",
    (),
    lambda v: (type(v).__name__, tuple(v)),
    lambda c: getattr(torch.return_types, c[0])(c[1]),
)
"""The named tuples that torch's functions return, such as `torch.max(x, 0)`."""

CHANGING = (
    Kind("set", (set,), tuple, lambda c: set(), _fill_set),
    Kind(
        "deque",
        (deque,),
        lambda v: (v.maxlen, list(v)),
        lambda c: deque(maxlen=c[0]),
        _fill_deque,
        fits=lambda live, c: live.maxlen == c[0],
        hidden=1,
    ),
    Kind(
        "defaultdict",
        (defaultdict,),
        lambda v: (v.default_factory, dict(v)),
        lambda c: defaultdict(),
        _fill_default,
        hidden=1,
    ),
    Kind("bytearray", (bytearray,), bytes, lambda c: bytearray(), _fill_bytes),
    Kind(
        "array.array",
        (array.array,),
        lambda v: (v.typecode, v.tobytes()),
        lambda c: array.array(c[0]),
        _fill_array,
        fits=lambda live, c: live.typecode == c[0],
    ),
    _of_state(io.BytesIO, lambda c: io.BytesIO(), lambda v: v.__getstate__()),
    _of_state(io.StringIO, lambda c: io.StringIO(), lambda v: v.__getstate__()),
    _of_state(functools.partial, lambda c: functools.partial(int), lambda v: v.__reduce__()[2]),
    Kind(
        "itertools.count()", (itertools.count,), lambda v: v.__reduce__()[1], lambda c: itertools.count(*c), moves=True
    ),
    Kind(
        "numpy.random.SeedSequence",
        (np.random.SeedSequence,),
        _seeds,
        lambda c: np.random.SeedSequence(0),
        lambda live, c: live.__init__(c[0], spawn_key=c[1], pool_size=c[2], n_children_spawned=c[3]),
    ),
    Kind("SimpleNamespace", (types.SimpleNamespace,), vars, lambda c: types.SimpleNamespace(), fill_attributes),
    Kind(
        "random.Random",
        (random.Random,),
        lambda v: packed(v.getstate()),
        lambda c: random.Random(),
        lambda live, c: live.setstate(unpacked(c)),
    ),
    Kind(
        "numpy.random.BitGenerator",
        tuple(_BITS.values()),
        _save_bits,
        lambda c: _BITS[c[0]](),
        _fill_bits,
        fits=lambda live, c: type(live).__name__ == c[0],
    ),
    Kind(
        "numpy.random.Generator",
        (np.random.Generator,),
        lambda v: (type(v.bit_generator).__name__, v.bit_generator),
        lambda c: np.random.Generator(_BITS[c[0]]()),
        _fill_generator,
        fits=lambda live, c: type(live.bit_generator).__name__ == c[0],
    ),
    Kind(
        "numpy.random.RandomState",
        (np.random.RandomState,),
        lambda v: v.get_state(legacy=False),
        lambda c: np.random.RandomState(_BITS[c["bit_generator"]]()),
        lambda live, c: live.set_state(c),
        fits=lambda live, c: live.get_state(legacy=False)["bit_generator"] == c["bit_generator"],
    ),
    Kind(
        "torch.Generator",
        (torch.Generator,),
        lambda v: (str(v.device), v.get_state()),
        lambda c: torch.Generator(c[0]),
        lambda live, c: live.set_state(c[1]),
        fits=lambda live, c: live.device.type == torch.device(c[0]).type,
    ),
)
