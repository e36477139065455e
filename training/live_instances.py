"""Finds the living instances of some classes in this process."""

from __future__ import annotations

import gc
from typing import Any


def live_instances(*classes: type) -> list[Any]:
    """Return the instances of the classes and of their subclasses. Python code must define these classes: only then does an instance refer
    to its class.

    This function does not call `gc.get_objects`, whose result refers to all objects, also to a tuple that another thread is building. The
    other thread then fails with a SystemError in `_PyTuple_Resize` (https://bugs.python.org/issue15108). On a GPU, this ended the thread
    of a DataLoader that pins batches."""
    family = [*classes]
    for each in family:  # the list grows
        family += each.__subclasses__()
    return [each for each in gc.get_referrers(*family) if issubclass(type(each), classes)]
