"""Values of C in a snapshot: filled in place, so that what processes share stays shared."""

import ctypes
import multiprocessing
from collections.abc import Callable
from typing import Any

import pytest

from mt_resilient.resilience.errors import SnapshotError
from mt_resilient.training.state.values.value_source import Known, Packed


class Point(ctypes.Structure):
    _fields_ = (("number", ctypes.c_int), ("places", ctypes.c_double * 2))


class Named(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p),)


MAKERS: list[tuple[Callable[..., Any], Any, Any]] = [
    (ctypes.c_int, 3, 4),
    (lambda numbers: (ctypes.c_float * 3)(*numbers), (1, 2, 3), (4, 5, 6)),
    (Point, 3, 4),
    (lambda number: multiprocessing.Value("d", number), 3, 4),
    (lambda numbers: multiprocessing.Array("i", numbers), (1, 2), (3, 4)),
    (lambda number: multiprocessing.Value(Point, number), 3, 4),
]


def packing() -> Packed:
    return Packed("values", Known())


@pytest.mark.parametrize(("make", "value", "other"), MAKERS)
def test_a_value_of_c_is_filled_in_place(make: Callable[..., Any], value: Any, other: Any) -> None:
    kept, live = packing().pack(make(value)), make(other)
    assert packing().pack(live) != kept
    assert packing().unpack(kept, live) is live
    assert packing().pack(live) == kept


def test_one_that_is_not_there_is_made_again_except_of_a_class_of_the_script() -> None:
    made = packing().unpack(packing().pack(multiprocessing.Array("i", [1, 2])), None)
    assert made[:] == [1, 2]
    with pytest.raises(SnapshotError, match="a Point can be restored only into one that the script has created"):
        packing().unpack(packing().pack(Point(3)), None)


def test_addresses_are_refused() -> None:
    with pytest.raises(SnapshotError, match=r"it is a .*Named"):
        packing().pack(Named(b"x"))
