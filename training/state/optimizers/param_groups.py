"""The parameters in an optimizer's groups: those that the script put there before the loop began, and the changes since.

A restart creates the groups that existed when the loop began. A restore creates the snapshot's further groups from the parameters that the
snapshot names. If a later group has parameters that no module of the Session has, only a rewind in place can restore it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.optim import Optimizer

from ....checkpoint.format.tensor_table import Piece
from ....resilience.errors import LayoutError

Named = Callable[[], Mapping[str, torch.Tensor]]
"""A function that returns the parameters of all modules of the Session, by name."""
Objects: TypeAlias = list[tuple[dict[str, Any], list[torch.Tensor]]]
"""The groups at one moment, each with its parameters."""
_BEGAN = "began"


class Groups:
    """The groups of one optimizer."""

    def __init__(self, inner: Optimizer, named: Named) -> None:
        """Record the groups as the loop begins."""
        self._inner, self._named = inner, named
        self._names = self._named_now()
        order = {id(each): -at for at, each in enumerate(reversed([*named().values()]))}
        mixed = {str(n): self._names[n] for n, ids in enumerate(self._ids()) if _is_mixed(ids, order)}
        self._mixed: dict[str, Any] = {_BEGAN: len(self._names), **mixed} if mixed else {}
        """Groups that list their parameters in another sequence than the modules do. After a restart, such a group may list them in yet
        another sequence."""
        self._shapes = [[each.shape for each in group["params"]] for group in inner.param_groups]
        self._remember()
        self.bound = ""
        """The reason why no restart could create the groups that `changed` last saw; empty if one could."""

    def changed(self) -> dict[str, Any]:
        """Return the parameters' names in each group that is new, has other parameters, or lists them in another sequence than the modules
        (as sets do). Also return the number of groups when the loop began."""
        self.bound = ""
        if (ids := self._ids()) == self._known:
            return dict(self._mixed)
        changed = {key: names for key, names in self._mixed.items() if key != _BEGAN}
        for number, names in enumerate(self._named_now()):
            if self._names[number : number + 1] == [names]:  # the names are the same, though the parameters may be new
                continue
            changed[str(number)] = names
            if "" in names:
                self.bound = (
                    f"the optimizer's parameter group {number} has changed since the loop began, and has parameters of a module that the "
                    "Session does not know. A restart can't create this group. Give the Session that module, or create all groups at the "
                    "start (for example with a learning rate of 0)"
                )
        if changed or len(ids) != len(self._began):
            return {_BEGAN: len(self._began), **changed}
        self._remember()
        return dict(self._mixed)

    def grown(self) -> dict[str, list[int]]:
        """Return the first shapes, by position, of parameters that have changed their shape and that no module has, such as split
        Gaussians."""
        found = {
            (number, at): [*began]
            for number, group in enumerate(self._inner.param_groups[: len(self._shapes)])
            for at, (each, began) in enumerate(zip(group["params"], self._shapes[number], strict=False))
            if each.shape != began
        }
        names = self._named_now() if found else []
        return {f"{number}.{at}": began for (number, at), began in found.items() if not names[number][at]}

    def make_room(self, place: str, parameter: torch.Tensor, kept: Piece, grown: Mapping[str, list[int]]) -> None:
        """Give a parameter that no module has its shape in the snapshot, if both runs began with the same shape. grown: the snapshot's
        record."""
        if parameter.shape == kept.shape or type(parameter.data) is not torch.Tensor:
            return
        number, at = map(int, place.split("."))
        if [*self._shapes[number][at]] == [*grown.get(place, kept.shape)]:
            parameter.grad = None
            parameter.data = parameter.data.new_zeros(kept.shape)

    def _remember(self) -> None:
        """Record the parameters from when the loop began, or the parameters that have since replaced them."""
        self._began = [list(group["params"]) for group in self._inner.param_groups]
        self._known = self._ids()

    def make(self, count: int, changed: Mapping[str, Any]) -> list[torch.Tensor]:
        """Create `count` groups: those from when the loop began, with the changes in `changed`. Return the parameters that no group
        contains any more. Raises LayoutError if the groups can't be created."""
        groups, began, here = self._inner.param_groups, changed.get(_BEGAN, count), len(self._began)
        if began != here:
            raise LayoutError(
                f"this run's optimizer starts with {here} parameter groups, and the snapshot's started with {began}: "
                "they are different optimizers"
            )
        named = self._named() if changed or self._mixed or self._ids() != self._known else {}
        wanted = [self._as_begun(number, named) for number in range(min(here, count))]
        for key in self._mixed.keys() - changed.keys() - {_BEGAN}:
            wanted[int(key)] = [each for name, each in named.items() if name in self._mixed[key]]
        for key in sorted(changed.keys() - {_BEGAN}, key=int):
            if missing := [name for name in changed[key] if name not in named]:
                raise LayoutError(
                    f"the snapshot's optimizer has the parameter {missing[0]}, which this run does not have"
                )
            wanted[int(key) : int(key) + 1] = [[named[name] for name in changed[key]]]
        before = [each for group in groups for each in group["params"]]
        del groups[count:]
        for number, parameters in enumerate(wanted):
            if number < len(groups):
                groups[number]["params"][:] = parameters
            else:
                self._inner.add_param_group({"params": parameters})
        return _gone(before, groups)

    def made_of(self, changed: Mapping[str, Any], count: int) -> bool:
        """Whether the groups already match the snapshot's record."""
        return len(self._inner.param_groups) == count and self.changed() == changed

    def objects(self) -> Objects:
        return [(group, list(group["params"])) for group in self._inner.param_groups]

    def put_back(self, objects: Objects) -> list[torch.Tensor]:
        """Put the recorded objects back into the groups. Return the parameters that no group contains any more."""
        groups = self._inner.param_groups
        before = [each for group in groups for each in group["params"]]
        groups[:] = [group for group, _ in objects]
        for group, parameters in objects:
            group["params"][:] = parameters
        return _gone(before, groups)

    def _as_begun(self, number: int, named: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return the parameters that a group had when the loop began, or the parameters that have replaced them."""
        groups, began = self._inner.param_groups, self._began[number]
        live = groups[number]["params"] if number < len(groups) else []
        known = live if len(live) == len(began) else began
        return [named.get(name, each) for name, each in zip(self._names[number], known, strict=True)]

    def _ids(self) -> list[list[int]]:
        return [list(map(id, group["params"])) for group in self._inner.param_groups]

    def _named_now(self) -> list[list[str]]:
        """Return the names of the parameters in each group. A parameter that no module has gets an empty name."""
        names = {id(parameter): name for name, parameter in self._named().items()}
        return [[names.get(id(each), "") for each in group["params"]] for group in self._inner.param_groups]


def _is_mixed(ids: Sequence[int], order: Mapping[int, int]) -> bool:
    places = [order[each] for each in ids if each in order]
    return len(places) == len(ids) and places != sorted(places)


def _gone(before: Sequence[torch.Tensor], groups: Sequence[Mapping[str, Any]]) -> list[torch.Tensor]:
    there = {id(each) for group in groups for each in group["params"]}
    return [each for each in before if id(each) not in there]
