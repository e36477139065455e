"""The position of Megatron's external data loaders (`--dataloader-type external`), if the loaders can save and restore it.

A loader can do so if it, or the loader that it wraps, has a pair of methods such as Energon's `save_state_rank` and `restore_state_rank`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..attach.unknown_loop import tell_once
from ..state.values.value_source import Known, Stateful

_PAIRS = (("save_state", "restore_state"), ("save_state_rank", "restore_state_rank"), ("state_dict", "load_state_dict"))
_INSIDE = ("_dataloader", "dataloader", "loader")
"""Attributes that hold the loader inside a wrapper, such as the wrapper in Megatron's examples for Energon."""


class ExternalData:
    """A source for a session: the states of this rank's loaders, which are restored after the loop has created new loaders."""

    __slots__ = ("_iterators", "_kept", "_validates")

    def __init__(self, training: Any, *validation: Any) -> None:
        """validation: the iterator of the validation, if its position can be saved too."""
        self._validates = bool(validation)
        self._iterators = [training, *validation]
        self._kept: list[Any] | None = None
        """The restored states, until the loop has created new loaders."""

    def state_dict(self) -> dict[str, Any]:
        if self._kept is not None:
            return {"loaders": self._kept}
        return {"loaders": [getattr(loader, save)() for loader, save, _ in _loaders(self._iterators)]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._kept = state["loaders"]

    @property
    def complete(self) -> bool:
        """Whether the position of each loader of this rank can be saved."""
        try:
            Stateful("data", self, Known()).collect()
        except Exception:  # a loader may refuse for any reason; then the loop continues without this source
            return False
        return True

    def put_back(self, training: Any, validation: Any = None) -> None:
        """Restore the states of the new loaders."""
        self._iterators = [training, validation] if self._validates else [training]
        for (loader, _, restore), kept in zip(_loaders(self._iterators), self._kept or (), strict=False):
            getattr(loader, restore)(kept)
        self._kept = None


def external_data(training: Any, validation: Any) -> ExternalData | None:
    """Return the source of the loaders whose position can be saved; None if that of the training can't be. Tell of a validation that begins
    at each recovery."""
    if not (found := ExternalData(training)).complete:
        return None
    if (both := ExternalData(training, validation)).complete:
        return both
    tell_once(
        "the loader of the validation data cannot save its position. After a recovery, the validation begins with its first batch"
    )
    return found


def _loaders(iterators: Any) -> Iterator[tuple[Any, str, str]]:
    """Yield each loader with the names of its two methods. Raises LookupError if one has no such methods."""
    for iterator in iterators if isinstance(iterators, list) else [iterators]:
        if isinstance(iterator, list):
            yield from _loaders(iterator)
            continue
        # The iterator's own state_dict has only the micro-batches that Megatron may replay.
        if type(iterator).__name__ == "RerunDataIterator":
            iterator = iterator.iterable
        if iterator is not None:
            yield _pair(iterator, len(_INSIDE))


def _pair(loader: Any, depth: int) -> tuple[Any, str, str]:
    for pair in _PAIRS:
        if all(callable(getattr(loader, name, None)) for name in pair):
            return (loader, *pair)
    inside = next((value for name in _INSIDE if (value := getattr(loader, name, None)) is not None), None)
    if inside is None or not depth:
        raise LookupError(f"{type(loader).__name__} cannot save its place")
    return _pair(inside, depth - 1)
