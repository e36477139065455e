"""Reseeds random generators that imported packages created without a seed. Each rank gets a new state for these generators from the system,
as if the rank had run the imports itself.

This module finds Python's generators by watching their method `seed`. The module finds numpy's generators by the size of their seed: a
number that large comes from the system.
"""

from __future__ import annotations

import gc
import random
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_DRAWN = 1 << 96
"""The least seed that counts as drawn from the system. numpy draws 128 bits if the program gives no seed. Programmers write no seed as
large as this."""
_found: weakref.WeakValueDictionary[int, random.Random] = weakref.WeakValueDictionary()
_of_numpy: list[Any] = []


@contextmanager
def noted() -> Iterator[None]:
    """Within this context, record generators that are created without a seed, for `draw_anew`."""
    seed = random.Random.seed

    def listening(self: random.Random, *given: Any, **more: Any) -> None:
        seed(self, *given, **more)
        if (*given, *more.values())[:1] in ((), (None,)):
            _found[id(self)] = self
        else:
            _found.pop(id(self), None)

    random.Random.seed = listening  # type: ignore[method-assign]
    try:
        yield
    finally:
        random.Random.seed = seed  # type: ignore[method-assign]
        numpy: Any = sys.modules.get("numpy.random")
        kinds = set(numpy.BitGenerator.__subclasses__()) if numpy else set()
        _of_numpy[:] = [each for each in gc.get_objects() if type(each) in kinds and _entropy(each) >= _DRAWN]


def draw_anew() -> None:
    for each in list(_found.values()):
        each.seed()
    for each in _of_numpy:
        each.state = type(each)().state
    _found.clear()
    _of_numpy.clear()


def _entropy(generator: Any) -> int:
    entropy = getattr(generator.seed_seq, "entropy", None)
    return entropy if type(entropy) is int else 0
