"""Record how modules and parameters looked when first seen: which attributes a restart recreates, and all attribute names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from ...warm.side_effects import is_scripts
from ..values.borrowed_memory import Lenders, Loans
from . import attribute_rules
from .attribute_rules import Owner, is_constant, is_fixed, is_scripts_object, is_value, looked_at
from .attribute_sources import borrows
from .foreign_objects import Foreigners, is_foreign


class Began(NamedTuple):
    """One module or parameter, as it was when first seen."""

    thing: Any
    made: Mapping[str, Any]
    """Attributes that the script recreates: fixed values, values that use memory of models or optimizers, and third-party objects."""
    names: frozenset[str]
    """The names of all attributes."""
    kept: frozenset[str]
    """The names of the attributes that a snapshot may contain."""
    ids: Mapping[str, int]
    """The ids of all values, by attribute name."""


NEW = Began(None, {}, frozenset(), frozenset(), {})


class Beginnings:
    def __init__(self, lenders: Lenders, foreign: Foreigners) -> None:
        self._lenders, self._foreign = lenders, foreign
        self._began: dict[int, Began] = {}
        """The records, by id of the module or parameter."""

    def __contains__(self, thing: Any) -> bool:
        return id(thing) in self._began

    def of(self, thing: Any) -> Began:
        return self._began.get(id(thing), NEW)

    def add(self, thing: Any, owner: Owner, loans: Loans) -> None:
        if id(thing) in self._began:
            return
        own, kind = dict(looked_at(thing, owner)), type(thing)
        others = {
            name
            for name, value in own.items()
            # Most values from installed packages that no snapshot can store never change.
            if self._may_change(value) and (not is_value(type(value), kind) or not self._foreign.packs(value))
        }
        for name in others:
            self._foreign.begin(own[name], name)
        made = {
            name: value
            for name, value in own.items()
            if name in others
            or is_fixed(value)
            # No snapshot stores a sparse tensor. Most sparse tensors in attributes describe a graph and never change.
            or (isinstance(value, torch.Tensor) and value.layout is not torch.strided)
            or (owner is not Owner.LAYER and borrows(value, loans))
        }
        kept = {
            name
            for name, value in own.items()
            if name in others or is_fixed(value) or is_value(type(value), kind) or is_scripts_object(value)
        }
        self._began[id(thing)] = Began(
            thing, made, frozenset(own), frozenset(kept), {name: id(value) for name, value in own.items()}
        )

    def add_new(self, thing: Any) -> None:
        """Record a parameter that has no attributes yet."""
        self._began.setdefault(id(thing), NEW)

    def gone(self, thing: Any) -> list[str]:
        """Return the names of the attributes that the script has deleted since the record."""
        kept = self.of(thing).kept
        return sorted(kept - attribute_rules.every(thing).keys()) if kept else []

    def is_foreign(self, value: Any, of: type) -> bool:
        """Whether the value is a third-party object that may change, and that each restart recreates."""
        return self._may_change(value) and not is_value(type(value), of)

    def _may_change(self, value: Any) -> bool:
        kind: Any = type(value)
        if is_constant(value) or not is_foreign(kind) or id(value) in self._lenders.names:
            return False
        return not is_scripts(kind.__module__)
