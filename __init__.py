"""Fault-tolerant runtime for large-model training: any fault costs seconds, and the bits stay the same.

`mt-resilient run -- torchrun … train.py` needs no change of code; a custom loop takes ten lines with `Session`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .formats.zarr_store import SnapshotStore as SnapshotStore
    from .training.session import Session as Session
    from .training.state.values.class_adapters import register as register

__all__ = ["Session", "SnapshotStore", "__version__", "register"]

_MODULES = {
    "Session": ".training.session",
    "SnapshotStore": ".formats.zarr_store",
    "register": ".training.state.values.class_adapters",
}
"""Imported at first use: `import mt_resilient` must not import torch, and zarr-python is an extra."""


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name], __name__), name)
    if name == "__version__":
        return import_module("importlib.metadata").version("mt-resilient")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
