"""What a rank says of its data, each once: a place that was put back at a cost, or not at all."""

from __future__ import annotations

from collections.abc import Iterable

from ..attach.rank_stderr import say

_OTHER_DRAWS = (
    ". Its workers stay from epoch to epoch, and were started again. Where they draw random numbers, they draw others now: "
    "give session.batches the DataLoader itself, or leave persistent_workers out"
)
_TWICE = "samples of this epoch may be used twice, and others not at all"
_SAMPLER_DIFFERS = (
    "the sampler of this loader now chooses other samples than before the recovery, for the {used} batches of this epoch that were used "
    f"already. So {_TWICE}. Let the sampler choose the order at the start of an epoch, from a seed or from what a recovery puts back "
    "(docs/data.md)"
)
_LOADER_DIFFERS = (
    "this loader, gone through again from the start of its epoch, now gives other batches than before the recovery, for the {used} that "
    f"were used already. If it is their order that differs, {_TWICE}. Give whatever shuffles or draws in it a seed (docs/data.md)"
)


class Notices:
    def __init__(self, first: bool = False) -> None:
        """first: of the ranks. The others say only what may be so on them alone."""
        self._first = first
        self._lost: set[str] = set()
        """What was told to have changed."""
        self._said: set[str] = set()

    def _once(self, which: str, sentence: str) -> None:
        if which not in self._said:
            self._said.add(which)
            say(sentence)

    def lost(self, names: Iterable[str]) -> None:
        """names: of what has changed and cannot be kept."""
        new = [name for name in names if name not in self._lost]
        self._lost.update(new)
        if new and self._first:
            say(
                f"{', '.join(new)} has changed, and is not put back: it is too large, or nobody knows how to save it. A batch that depends "
                "on it may differ after a recovery. Give it to the Session, or keep it out of the loader (docs/data.md)"
            )

    def replayed(self, used: int, took_s: float, other_draws: bool) -> None:
        if self._first:
            self._once(
                "replayed",
                "this loader can only be replayed from the start of its epoch. Batches loaded again and thrown away: "
                f"{used}, in {took_s:.1f} s. A DataLoader over a map-style dataset, or a loader with a state_dict, is put "
                f"back without that{_OTHER_DRAWS if other_draws else ''}",
            )

    def differs(self, used: int, of_sampler: bool) -> None:
        if "grown" not in self._said:
            self._once("differs", (_SAMPLER_DIFFERS if of_sampler else _LOADER_DIFFERS).format(used=used))

    def grown(self, now: int, before: int) -> None:
        self._once(
            "grown",
            f"the dataset now has {now} samples, and had {before} when this epoch began. So {_TWICE}. Keep the samples of a job the same "
            "until it ends (docs/data.md)",
        )

    def ended(self, promised: int | None, steps: int) -> None:
        """Of an epoch. promised: steps by which the loop was told its end; None: it was not, or rightly."""
        if self._first and promised not in (None, steps):
            self._once(
                "ended",
                f"this epoch had {steps} steps, and len(loader) promised {promised}: so session.epoch_ends was true before its last step, "
                "or not at all. Give the loader, or its batch sampler, an exact len, or take the end of an epoch from session.epoch "
                "(docs/data.md)",
            )
