"""Modules as a source of state: parameters and buffers by name, and beside them, where there is any, what their modules keep otherwise
(`extra.py`), and what has changed about them since the loop began (`outline.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch

from ..checkpoint.tensors import Piece
from ..resilience.errors import LayoutError, SnapshotError
from .extra import Extra
from .finite import finite, sums
from .live import Nested, misfit, put
from .names import Named, Names
from .ordinary import all_ordinary, check, ordinary
from .outline import Outline

CHANGED, EXTRA = ".changed", ".extra"
"""Beside the tensors: torch allows no name that begins with a dot."""
_NAMED = 3
"""Tensors that are named where some do not fit."""
_MADE = attrgetter("shape", "dtype", "requires_grad")


class Modules:
    """Parameters and buffers, the non-persistent ones too, of one module or of the chunks of a pipeline stage."""

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        self.chunks = list(chunks)
        self._names = Names()
        self._outline: Outline | None = None
        """None until the loop begins."""
        self._extra = Extra({})
        self._stale = True
        """The modules look otherwise than when `_extra` was made."""
        self._seen: list[Any] = []
        self._changes: Nested = {}
        self._otherwise = ""
        """What no new process could make of them."""
        self.buffers: frozenset[str] = frozenset()
        """Names of those in what was collected last."""
        self._trained: list[str] = []
        self._unjudged: frozenset[str] = frozenset()

    def named(self) -> tuple[Named, Named]:
        """Parameters and buffers as the modules have them."""
        parameters, buffers = self._names.of(self.chunks)
        self._stale = self._stale or self._names.anew
        return parameters, buffers

    def known_as(self, source: str) -> Named:
        """Parameters by their names in the session, in which the modules are `source`."""
        return {f"{source}/{name}": parameter for name, parameter in self.named()[0].items()}

    def tensors(self) -> Named:
        """What lies here of each, live. Raises SnapshotError for what cannot be saved."""
        return self._gather()[1]

    def _gather(self) -> tuple[Named, Named]:
        """Parameters and buffers as the modules have them, and what lies here of them."""
        parameters, buffers = self.named()
        self._trained = [name for name, each in parameters.items() if each.requires_grad]
        named = here = parameters | buffers
        if all_ordinary(named):
            self.buffers = frozenset(buffers)
        else:
            apart = ordinary(buffers, _buffer)
            self.buffers = frozenset(apart)
            here = ordinary(parameters, _parameter) | apart
        if self._stale:
            check(here, lambda name: _buffer(name) if name in self.buffers else _parameter(name))
        return named, here

    def parameters(self, collected: Nested) -> list[torch.Tensor]:
        """Those in what was `collected` last."""
        return [each for name, each in collected.items() if name not in self.buffers and name[:1] != "."]

    def judged(self, collected: Nested) -> list[torch.Tensor]:
        """Those in what was `collected` last in which NaN or Inf is news: that are trained, and were free of it when the loop began."""
        names = (name for name in self._trained if name in collected and name not in self._unjudged)
        return [collected[name] for name in names]

    def excuse(self) -> None:
        """The loop begins: what is not finite now is so on purpose, such as a padding row of NaN."""
        tensors = self.tensors()
        with torch.no_grad():
            self._unjudged = frozenset(
                n for n in self._trained if n in tensors and not finite(sums([tensors[n].detach()]))
            )

    @property
    def gathered(self) -> bool:
        """The parameters are, during the forward pass: it writes all of them then, and not the buffers alone."""
        return any(getattr(getattr(c, "ddp_config", None), "overlap_param_gather", False) for c in self.chunks)

    def steady(self, collected: Nested) -> list[torch.Tensor]:
        """What in what was `collected` last only an optimizer's step writes."""
        return [] if self.gathered else self.parameters(collected)

    def collect(self) -> Nested:
        named, kept = self._gather()
        outline = self._look()
        if self._otherwise:
            raise SnapshotError(
                f"the modules have changed since the loop began, {self._otherwise}, and a restart makes them as at the beginning. To have "
                "all of them at the start, build them before the Session"
            )
        seen = [*map(_MADE, named.values()), [module.training for module in self._names.modules]]
        if seen != self._seen:
            self._seen, self._changes = seen, outline.changes()
        more = {CHANGED: self._changes, EXTRA: self._extra.collect()}
        return kept | {key: value for key, value in more.items() if value}

    def prepare(self, described: Nested) -> None:
        live, outline = self.tensors(), self._look()
        if self._otherwise:
            outline.put_back()
            live, outline = self.tensors(), self._look()
        told = described.get(CHANGED, {})
        pieces: dict[str, Piece] = {name: piece for name, piece in described.items() if name[:1] != "."}
        free = outline.may_change(told)
        odd = [f"{name}: only the snapshot holds it" for name in sorted(pieces.keys() - live.keys() - free)]
        odd += [f"{name}: only this run has it" for name in sorted(live.keys() - pieces.keys() - free)]
        odd += [why for n in live if n in pieces and n not in free and (why := misfit(n, live[n], pieces[n]))]
        if odd:
            more = f", and so on ({len(odd)} tensors)" if len(odd) > _NAMED else ""
            raise LayoutError(
                f"{', '.join(odd[:_NAMED])}{more}; it was taken with another model or another parallel layout"
            )
        outline.follow(told, pieces)

    def follow(self, described: Nested) -> None:
        """Make flags and modes as in a snapshot of another layout. Raises LayoutError where tensors have changed since the loop began."""
        told = described.get(CHANGED, {})
        if "tensors" in told:
            raise LayoutError(
                f"{min(told['tensors'])} has changed its shape while it trained: such a state is restored in the same layout only"
            )
        self.tensors()
        self._look().follow(told, {})

    def restore(self, kept: Nested) -> None:
        for name, tensor in self.tensors().items():
            put(tensor, kept[name])
        self._extra.restore(kept.get(EXTRA, {}))

    def _look(self) -> Outline:
        """How the modules are made, looked at again where they have changed."""
        if self._outline is None:
            self._outline = Outline(self.chunks)
        elif self._stale:
            self._otherwise = self._outline.look()
        if self._stale:
            self._extra = Extra(self._outline.modules)
            self._seen, self._stale = [], False
        return self._outline


def _parameter(name: str) -> str:
    return f"the parameter {name}"


def _buffer(name: str) -> str:
    return f"the buffer {name}"
