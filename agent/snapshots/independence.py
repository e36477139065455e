"""Decides whether replicas differ because each rank trains independently, or because its kernels are not deterministic. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...checkpoint.arena.slot_header import Stamp
from ...checkpoint.format import replica_agreement
from ...checkpoint.format.replica_ledger import Apart
from ...resilience.model.types import Step

_SNAPSHOTS, _LIVES = 4, 4
"""For the comparison with a replay: how many diverged snapshots of each life of the ranks are remembered, and for how many lives."""


@dataclass(frozen=True)
class Early:
    """Tensors that are not compared, because replicas differ in them on purpose: they differed before they were trusted, or again after a
    replay."""

    step: Step
    names: tuple[str, ...]
    blind: bool
    """Whether no tensor is compared any more."""


class Independence:
    def __init__(self, window_h: float) -> None:
        """window_h: for how many hours a divergence counts, as `recovery.mismatch_window_h`."""
        self._window_s = window_h * 3600
        self._parted: list[tuple[Stamp, float]] = []
        """By life of the ranks (generation and rewinds): the first snapshot in which every optimizer moment (such as Adam's averages)
        differed between ranks, and no rank was in a minority; and the wall-clock seconds of the last one."""
        self._bits: dict[Stamp, dict[str, Mapping[int, int]]] = {}
        """By snapshot and tensor: what each rank held when the tensor had diverged, and no rank was in a minority. Only the first such
        snapshots of each life of the ranks are kept."""

    def shown(self, stamp: Stamp, found: Sequence[Apart], agreed: Mapping[Stamp, bool], wall_s: float) -> bool:
        """Return whether this snapshot shows that replicas differ without a fault. All optimizer moments of the snapshot differ. If all
        moments differ again after the ranks went back and replayed the same steps, the script trains each rank independently, as local SGD
        does after its warm-up. A bit flip affects one tensor, and seldom happens twice. If replays agree, but all moments differ for the
        third time, each rank computes its steps a little differently by chance. agreed: for each snapshot, whether the replicas agreed."""
        if any(replica_agreement.wrong(each.words) is not None for each in found):
            return False
        self._parted = [(at, at_s) for at, at_s in self._parted if wall_s - at_s <= self._window_s]
        first = self._parted[-1][0] if self._parted else stamp
        if stamp[:2] == first[:2]:
            self._parted[-1:] = [(min(stamp, first), wall_s)]
            return False
        self._parted.append((stamp, wall_s))
        replayed = any(same and at[:2] > first[:2] and at.step >= first.step for at, same in agreed.items())
        return not replayed or len(self._parted) > 2

    def again(self, stamp: Stamp, found: Sequence[Apart]) -> tuple[str, ...]:
        """Return the tensors that diverged at this step before, and hold the same bits on each rank again. Since then, the ranks went back
        to equal bits, and the replay gave the same difference. A bit flip would be gone then, or affect one tensor. So the script trains
        the returned tensors on each rank independently."""
        fair = [each for each in found if replica_agreement.wrong(each.words) is None]
        before = [bits for at, bits in self._bits.items() if at.step == stamp.step]
        same = tuple(each.name for each in fair if any(bits.get(each.name) == each.words for bits in before))
        if fair and sum(at[:2] == stamp[:2] for at in self._bits) < _SNAPSHOTS:
            self._bits[stamp] = {each.name: each.words for each in fair}
            self._bits = dict(sorted(self._bits.items())[-_SNAPSHOTS * _LIVES :])
        return same if len(same) > 1 else ()
