"""A state through a snapshot's bytes, and back into live sources: the same ones, as in a rewind in place, or those of a new process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch

from mt_resilient.checkpoint.arena.staging import flat, lay_out
from mt_resilient.checkpoint.format.pytree_walk import flatten
from mt_resilient.checkpoint.format.tensor_table import Table
from mt_resilient.resilience.inprocess.tally import RANDOMNESS
from mt_resilient.training.snapshot.restore import Restorer
from mt_resilient.training.state.modules.module_source import Modules
from mt_resilient.training.state.optimizers.optimizers import Optimizers
from mt_resilient.training.state.rng import Alone, Randomness
from mt_resilient.training.state.sources import shard_again, sources_of


class Life:
    """The sources of one process."""

    def __init__(self, **things: Any) -> None:
        self.sources = sources_of(things)
        self._alone = Alone(Randomness(()))

    @property
    def bound(self) -> str:
        """Why only this process could take the last snapshot."""
        return next((each.bound for each in self._remade().values() if each.bound), "")

    def objects(self) -> dict[str, Any]:
        """Of which models and optimizers are made now."""
        return {name: source.objects() for name, source in self._remade().items()}

    def _remade(self) -> dict[str, Modules | Optimizers]:
        return {name: each for name, each in self.sources.items() if isinstance(each, Modules | Optimizers)}

    def snapshot(self) -> tuple[bytes, dict[str, bytes]]:
        """The table in JSON, and each tensor's bytes."""
        shard_again(self.sources)
        state = {**{name: source.collect() for name, source in self.sources.items()}, RANDOMNESS: self._alone.collect()}
        skeleton, leaves = flatten(state, torch.is_tensor)
        layout = lay_out(leaves)
        table = Table(skeleton=skeleton, pieces=layout.pieces, payload_bytes=layout.payload_bytes)
        return table.to_json(), {name: _bytes(leaf) for name, leaf in leaves}

    def restore(self, snapshot: tuple[bytes, Mapping[str, bytes]], objects: Mapping[str, Any] | None = None) -> None:
        """objects: of the same process, at the snapshot."""
        shard_again(self.sources)
        for name, each in (objects or {}).items():
            self._remade()[name].put_back(each)
        table, content = Table.from_json(snapshot[0]), copy.copy(snapshot[1])

        def bring(into: dict[str, torch.Tensor]) -> None:
            for name, tensor in into.items():
                if content[name]:
                    flat(tensor).copy_(torch.frombuffer(bytearray(content[name]), dtype=torch.uint8))

        Restorer(self.sources, self._alone, 0, 1).fill(table, bring)


Made = tuple[dict[str, Any], Callable[[int], Any], Callable[[], Any]]
"""What the Session is given, a step with its number, and what there is to be seen."""


def comes_back(
    make: Callable[[], Made], steps: int, on: int = 0, *, often: bool = False, begun: bool = True, changes: bool = True
) -> tuple[bytes, dict[str, bytes]]:
    """Check that all looks as it did after `steps` steps once a snapshot from then is restored, in place and in a new process, and that the
    next `on` steps give what they gave. Return the snapshot. often: take a snapshot after each step. begun: take one in the new process
    before the restore. changes: check that one step more is to be seen."""
    given, step, looks = make()
    life = Life(**given)
    life.snapshot()  # before the first step

    def train(first: int, last: int) -> None:
        for n in range(first, last):
            step(n)
            if often:
                life.snapshot()

    def seen(step: Callable[[int], Any], looks: Callable[[], Any]) -> list[Any]:
        found = [looks()]
        for n in range(steps, steps + on):
            step(n)
            found.append(looks())
        return found

    train(0, steps)
    kept, expected = life.snapshot(), seen(step, looks)
    train(steps + on, steps + on + 1)
    assert looks() != expected[0] or not changes
    life.restore(kept)
    assert seen(step, looks) == expected, "in place"
    given, step, looks = make()
    life = Life(**given)
    if begun:
        life.snapshot()
    life.restore(kept)
    assert seen(step, looks) == expected, "in a new process"
    return kept


def _bytes(leaf: Any) -> bytes:
    tensor = leaf if isinstance(leaf, torch.Tensor) else torch.from_numpy(leaf)
    return flat(tensor).numpy().tobytes()
