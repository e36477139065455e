"""Describes which place a piece of a tensor has in the global tensor (a tensor that is split over ranks). Finds the elements that two
layouts share. Pure; uses neither torch nor files.

A rank's live tensor is a list of `Part`s. Writing needs nothing more: the bytes are written as they lie in memory. Reading in another
layout goes part → `boxes` → `overlap` of each wanted box with each saved box → copy.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from msgspec import Struct
from msgspec.structs import replace

from .schema import MOST_AXES, Axes, Name, Size

Shape = tuple[int, ...]

_PRIME = (1 << 127) - 1
_POINT = tuple(secrets.randbelow(_PRIME - 2) + 2 for _ in range(MOST_AXES))
"""A random coordinate for each axis. A snapshot's writer cannot know it."""


OUTDATED = 1 << 30
"""An index in `Part.replica` of a holder whose elements are still those of the step before."""


class Part(Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """A box of the global tensor `name`, or a flat range of such a box. A Part also says which elements of a live tensor contain the box.
    In a table, a Part is a JSON array of its fields, in this order."""

    name: Name
    shape: Axes
    """Shape of the global tensor."""
    offset: Axes
    """First index of the box in the global tensor."""
    box: Axes
    """The shape of the box, with as many axes as the global tensor."""
    flat: tuple[Size, Size] | None = None
    """If set, the part is only the elements [start, stop) of the row-major box: the shard of a distributed optimizer may end inside a
    box."""
    replica: Axes = ()
    """Position of this holder among the holders of the same elements, along axes that the framework defines. Exactly one holder has only
    zeros. The last axis counts data-parallel holders, whose bits are equal. Holders along another axis (tensor-parallel ranks) may differ
    by rounding."""
    start: Size = 0
    """Index, in the flattened row-major live tensor, of this part's first element."""
    strides: Axes | None = None
    """Elements of the live tensor between neighbouring indexes of the box, by axis. None if the box is row-major there, without gaps. (A
    gated layer's halves and stacked experts are views with strides, or transposed ones.)"""
    stacked: Size = 0
    """Number of leading axes that count tensors (layers, experts). A scalar that belongs to the tensor, such as a step count, has these
    axes too."""
    padded: bool = False
    """The first axis is padded to suit the layout (a vocabulary). The global shapes of two layouts may differ in that axis."""

    @property
    def elements(self) -> int:
        return math.prod(self.box) if self.flat is None else self.flat[1] - self.flat[0]

    @property
    def is_main(self) -> bool:
        return not any(self.replica)

    @property
    def is_outdated(self) -> bool:
        return max(self.replica, default=0) >= OUTDATED

    @property
    def last(self) -> int:
        """The index, in the live tensor, of this part's last element. The part must not be empty."""
        if self.strides is None:
            return self.start + self.elements - 1
        return self.start + sum((size - 1) * stride for size, stride in zip(self.box, self.strides, strict=True))


def cutting(parts: Sequence[Part]) -> int:
    """Return a sort key for how a live tensor with these parts is split: 0, not at all; 1, into boxes; 2, flat; 3, unknown. Flat
    parts that together fill their boxes do not split the tensor."""
    if not parts:
        return 3
    flat = [part for part in parts if part.flat is not None]
    around = {(part.name, part.offset, part.box) for part in flat}
    if sum(part.elements for part in flat) < sum(math.prod(box) for *_, box in around):
        return 2
    return int(any(part.box != part.shape for part in parts))


def row_major(shape: Shape) -> Shape:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def cut(shape: Shape, start: int, stop: int) -> Iterable[tuple[Shape, Shape]]:
    """Yield the flat range [start, stop) of a row-major array of `shape` as at most 2·axes - 1 boxes (offset, shape), in ascending
    order."""
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    inner = math.prod(shape[1:])
    first, head = divmod(start, inner)
    last, tail = divmod(stop, inner)
    if first == last or (head == 0 and stop == start + inner):
        yield from (((first, *offset), (1, *box)) for offset, box in cut(shape[1:], head, head + stop - start))
        return
    if head:
        yield from (((first, *offset), (1, *box)) for offset, box in cut(shape[1:], head, inner))
        first += 1
    if last > first:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    if tail:
        yield from (((last, *offset), (1, *box)) for offset, box in cut(shape[1:], 0, tail))


def boxes(part: Part) -> list[Part]:
    """Return the elements of `part` as parts without flat ranges, each with explicit strides."""
    strides = part.strides or row_major(part.box)
    if part.flat is None:
        return [replace(part, strides=strides)] if part.elements else []
    found, start = [], part.start
    for offset, box in cut(part.box, *part.flat):
        at = tuple(a + b for a, b in zip(part.offset, offset, strict=True))
        found.append(replace(part, offset=at, box=box, flat=None, start=start, strides=strides))
        start += math.prod(box)
    return found


def within(part: Part, begin: int, end: int) -> list[Part]:
    """Return the elements of `part` that lie in the range [begin, end) of the live tensor, as parts of that range. `part` must not have a
    flat range."""
    if part.strides is None:
        first, last = max(begin, part.start), min(end, part.start + part.elements)
        if first >= last:
            return []
        flat = None if last - first == part.elements else (first - part.start, last - part.start)
        return [replace(part, flat=flat, start=first - begin)]
    # With its axes sorted by stride, the part is a row-major array with gaps in the live tensor.
    strides = part.strides
    order = sorted(range(len(part.box)), key=lambda axis: -strides[axis] if part.box[axis] > 1 else -math.inf)
    lengths, steps = tuple(part.box[a] for a in order), tuple(strides[a] for a in order)
    low, high = (_elements_before(lengths, steps, bound - part.start) for bound in (begin, end))
    found = []
    for offset, box in cut(lengths, low, high):
        at, size = list(part.offset), list(part.box)
        for axis, index, length in zip(order, offset, box, strict=True):
            at[axis], size[axis] = part.offset[axis] + index, length
        start = part.start + sum(i * s for i, s in zip(offset, steps, strict=True)) - begin
        found.append(replace(part, offset=tuple(at), box=tuple(size), start=start))
    return found


def _elements_before(lengths: Shape, steps: Shape, bound: int) -> int:
    """Return how many elements of an array lie before the address `bound`. The array's strides are descending and nested."""
    count, inside = 0, True
    for axis, (length, step) in enumerate(zip(lengths, steps, strict=True)):
        whole = math.prod(lengths[axis + 1 :])
        if length == 1:
            continue
        index = min(max(bound, 0) // step, length)
        count += index * whole
        bound -= index * step
        inside = index < length
        if not inside:
            return count
    return count + (1 if inside and bound > 0 else 0)


@dataclass(frozen=True)
class Overlap:
    """A box that two live tensors share. In the source tensor, element [i, j, …] is at `source` + [i, j, …] · `source_strides`. In the
    target tensor, it is at `target` + [i, j, …] · `target_strides`."""

    box: Shape
    source: int
    source_strides: Shape
    target: int
    target_strides: Shape
    offset: Shape
    """Offset of the box in the global tensor."""


def overlap(source: Part, target: Part) -> Overlap | None:
    """Return the box that two parts of the same global tensor share; None if they share none. `boxes` has returned both parts."""
    low = tuple(max(a, b) for a, b in zip(source.offset, target.offset, strict=True))
    ends = [(o + n for o, n in zip(p.offset, p.box, strict=True)) for p in (source, target)]
    box = tuple(min(a, b) - at for a, b, at in zip(*ends, low, strict=True))
    if any(size <= 0 for size in box):
        return None
    return Overlap(box, *_address(source, low), *_address(target, low), low)


def covers(found: Iterable[tuple[Shape, Shape]], offset: Shape, box: Shape) -> bool:
    """Return whether the boxes (offset, shape) fill `box` at `offset`, with each element exactly once. The time is linear in their number.

    A set of elements is represented by a polynomial, with a term a₀^i·a₁^j… for each element [i, j, …]. Two sets count as equal if their
    polynomials are equal at a random point (Schwartz and Zippel). The answer is wrong at most once in 2⁶⁰ times.
    """
    total = sum(_value(tuple(a - b for a, b in zip(at, offset, strict=True)), size) for at, size in found)
    return total % _PRIME == _value((0,) * len(box), box) % _PRIME


def _value(offset: Shape, box: Shape) -> int:
    value = 1
    for point, at, size in zip(_POINT, offset, box, strict=False):
        value = value * pow(point, at, _PRIME) * (pow(point, size, _PRIME) - 1) % _PRIME
    return value


def _address(part: Part, at: Shape) -> tuple[int, Shape]:
    strides = part.strides or row_major(part.box)
    return part.start + sum((a - o) * s for a, o, s in zip(at, part.offset, strides, strict=True)), strides


def scalars(parts: Iterable[Part]) -> list[Part]:
    """Return the parts of a number that belongs to the tensor formed by `parts`, such as a step count: one scalar, or one for each stacked
    layer or expert. The rank with the tensor's first element is the main holder; all other ranks are replicas."""
    found: dict[tuple[str, Shape], Part] = {}
    for part in parts:
        lead = part.stacked
        first = not any(part.offset[lead:]) and (part.flat is None or part.flat[0] == 0)
        one = replace(
            part,
            shape=part.shape[:lead],
            offset=part.offset[:lead],
            box=(1,) * lead,
            flat=None,
            replica=(*part.replica, int(not first)),
            start=0,
            strides=None,
            padded=False,
        )
        known = found.get((one.name, one.offset))
        if known is None or one.replica < known.replica:
            found[one.name, one.offset] = one
    return list(found.values())
