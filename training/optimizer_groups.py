"""Which parameters an optimizer's groups have: as its script has made them when the loop began, and what has changed about that since.

A restart makes the groups of the beginning. Those that a snapshot has beside them are made again of the parameters that it names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from ..resilience.errors import LayoutError, SnapshotError

Named = Callable[[], Mapping[str, torch.Tensor]]
"""Asks for the parameters of all modules of the session, by name."""
_BEGAN = "began"


class Groups:
    """Of one optimizer."""

    def __init__(self, inner: Optimizer, named: Named) -> None:
        """The loop begins."""
        self._inner, self._named = inner, named
        self._began = [list(group["params"]) for group in inner.param_groups]

    def changed(self) -> dict[str, Any]:
        """Names of the parameters in each group that has come since the beginning, or has got or lost some; and how many there were. Raises
        SnapshotError where a restart could not make it again."""
        groups, before = self._inner.param_groups, list(map(len, self._began))
        now = [len(group["params"]) for group in groups]
        if now == before:
            return {}
        names = {id(parameter): name for name, parameter in self._named().items()}
        changed: dict[str, Any] = {_BEGAN: len(before)}
        for number, group in enumerate(groups):
            if now[number : number + 1] == before[number : number + 1]:
                continue
            changed[str(number)] = [names.get(id(parameter), "") for parameter in group["params"]]
            if "" in changed[str(number)]:
                raise SnapshotError(
                    f"the optimizer's parameter group {number} has changed since the loop began, and has parameters of no module that the "
                    "Session is given: a restart can't make it. Give the Session that module, or make all groups at the start (with a "
                    "learning rate of 0, say)"
                )
        return changed

    def make(self, count: int, changed: Mapping[str, Any]) -> list[torch.Tensor]:
        """Make `count` groups, those of the beginning but for what has `changed`; the parameters whose groups are gone. Raises LayoutError
        where that can't be."""
        groups, began, here = self._inner.param_groups, changed.get(_BEGAN, count), len(self._began)
        if began != here:
            raise LayoutError(
                f"the optimizer has {here} parameter groups at the start now, and had {began} in the snapshot: another model or optimizer"
            )
        wanted = dict(enumerate(self._began[:count]))
        named = self._named() if changed else {}
        for key in changed.keys() - {_BEGAN}:
            if missing := [name for name in changed[key] if name not in named]:
                raise LayoutError(f"the optimizer in the snapshot has the parameter {missing[0]}, and this run has not")
            wanted[int(key)] = [named[name] for name in changed[key]]
        gone = [parameter for group in groups[count:] for parameter in group["params"]]
        del groups[count:]
        for number, parameters in sorted(wanted.items()):
            if number >= len(groups):
                self._inner.add_param_group({"params": parameters})
            elif len(groups[number]["params"]) != len(parameters):
                groups[number]["params"][:] = parameters
        return gone
