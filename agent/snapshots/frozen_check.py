"""Detects that the model's parameters do not change although the ranks finish steps."""

from __future__ import annotations

import json
from collections.abc import Sequence

from ...checkpoint.arena.slot_header import Stamp
from ...checkpoint.format import pytree
from ...checkpoint.format.replica_agreement import Numbers
from ...checkpoint.format.tensor_table import Table
from ...resilience.errors import SnapshotError
from ...resilience.model.types import Step
from .fingerprint_source import Sight

STILL_SNAPSHOTS, STILL_STEPS = 10, 100
"""The least number of snapshots, and of steps that they span, with the same parameters for a warning. A script may accumulate gradients
over many steps."""


class Stillness:
    def __init__(self) -> None:
        self._since: Stamp | None = None
        """The first snapshot with the present parameters."""
        self._snapshots = 0
        """How many snapshots had these parameters, including the first."""
        self._words: list[bytes] = []
        self._frozen = Step(-1)

    def look(self, sight: Sight, parameters: Sequence[Numbers]) -> Step:
        """Return the step since which no parameter has changed; -1: parameters change, or too few steps were compared."""
        words = [each[numbers].tobytes() for each, numbers in zip(sight.words, parameters, strict=True)]
        since = self._since
        if since is None or words != self._words or not any(words) or sight.stamp.generation != since.generation:
            self._since, self._words, self._snapshots, self._frozen = sight.stamp, words, 1, Step(-1)
            return self._frozen
        self._snapshots += 1
        long = sight.stamp.step - since.step >= STILL_STEPS and self._snapshots >= STILL_SNAPSHOTS
        if long and self._frozen < 0 and _learns(sight.values):
            self._frozen = Step(since.step)
        return self._frozen


def _learns(table: bytes) -> bool:
    """Return False if the table shows that every learning rate is 0, or cannot be read; otherwise True."""
    if not table:
        return False
    try:
        values = pytree.values(Table.from_json(table).skeleton)
        rates = [value for name, value in values if name.endswith("/lr")]
    except SnapshotError:  # the table is damaged in memory: a rank that restores the snapshot will report it
        return False
    return not rates or any(json.dumps(rate) not in ("0", "0.0") for rate in rates)
