"""Messages of a rank about its data, each reported once: restoring a position in the data was costly, or was not possible."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ..attach.rank_stderr import say
from ..live_instances import live_instances

_OTHER_DRAWS = (
    ". Its persistent workers were started again, and now draw other random numbers than before. Give session.batches the DataLoader "
    "itself, or leave persistent_workers out"
)
_TWICE = "samples of this epoch may be used twice, and others not at all"
_SAMPLER_DIFFERS = (
    "the sampler of this loader now chooses other samples than before the recovery, for the {used} batches of this epoch that were used "
    f"already. So {_TWICE}. Let the sampler choose the order at the start of an epoch, from a seed or from state that a recovery restores "
    "(docs/data.md)"
)
_LOADER_DIFFERS = (
    "this loader was replayed from the start of its epoch, and now gives other batches than before the recovery, for the {used} that "
    f"were used already. If their order differs, {_TWICE}. Give a seed to everything in the loader that shuffles or draws random numbers "
    "(docs/data.md)"
)
_DRAWN_ANEW = (
    "the parallel layout has changed, so random generators start from the script's seed. The order of this loader's epoch comes from such "
    f"a generator, so {_TWICE}. Use a DistributedSampler, whose order follows from the number of the epoch (docs/data.md)"
)

_MOST = 2
"""At most this many steps at the beginning are watched. If these first steps show no computation, their batches count as read ahead."""
_READ_AHEAD = (
    "The first step of this loop computed no gradient before the loop took the next batch. If something around session.batches reads ahead "
    "(a prefetcher), a recovery skips batches. Put the prefetcher inside, as in session.batches(lambda: Prefetcher(loader), …), or let "
    "the DataLoader's workers read ahead (docs/data.md)"
)
_GOES_ON = (
    "This script continues one iterator from step to step, over a DataLoader of {samples} that session.batches does not use. A recovery "
    "does not restore this iterator's position. After a restart the iterator begins anew, and draws its random numbers at other steps. "
    "Take all batches from session.batches(lambda: zip(…)), or iterate over that loader within one step (docs/data.md)"
)


class Notices:
    def __init__(self, first: bool = False) -> None:
        """first: this is the first rank. Any other rank reports only events that may concern it alone."""
        self._first = first
        self._lost: set[str] = set()
        """Names of the values that were reported as changed."""
        self._said: set[str] = set()

    def _once(self, which: str, sentence: str) -> None:
        if which not in self._said:
            self._said.add(which)
            say(sentence)

    def lost(self, names: Iterable[str]) -> None:
        """Report values that have changed and can't be saved. names: the names of all such values so far."""
        new = [name for name in names if name not in self._lost]
        self._lost.update(new)
        if new and self._first:
            say(
                f"{', '.join(new)} has changed, and no recovery restores it: it is too large, cannot be saved, or is shared by workers "
                "that read ahead. A batch that depends on it may differ after a recovery. Give it to the Session, or keep it out of the "
                "loader (docs/data.md)"
            )

    def replayed(self, used: int, took_s: float, other_draws: bool) -> None:
        if self._first:
            self._once(
                "replayed",
                "this loader can only be replayed from the start of its epoch. Batches loaded again and thrown away: "
                f"{used}, in {took_s:.1f} s. A DataLoader over a map-style dataset, or a loader with a state_dict, returns to its "
                f"position without loading them{_OTHER_DRAWS if other_draws else ''}",
            )

    def differs(self, used: int, of_sampler: bool) -> None:
        if "grown" not in self._said:
            self._once("differs", (_SAMPLER_DIFFERS if of_sampler else _LOADER_DIFFERS).format(used=used))

    def drawn_anew(self) -> None:
        if self._first:
            self._once("drawn anew", _DRAWN_ANEW)

    def grown(self, now: int, before: int) -> None:
        self._once(
            "grown",
            f"the dataset now has {now} samples, and had {before} when this epoch began. So {_TWICE}. Keep the samples of a job the same "
            "until it ends (docs/data.md)",
        )

    def ended(self, promised: int | None, steps: int) -> None:
        """Report an epoch whose number of steps differs from the promised number. promised: the number that the loop got from
        `len(loader)`; None if it got no number, or a number that is certain."""
        if self._first and promised not in (None, steps):
            self._once(
                "ended",
                f"this epoch had {steps} steps, and len(loader) promised {promised}. So session.epoch_ends was true too early, "
                "or not at all. Give the loader, or its batch sampler, an exact len, or take the end of an epoch from session.epoch "
                "(docs/data.md)",
            )


class ReadAhead:
    """Detects that code around `session.batches`, such as a prefetcher, takes batches ahead of the training. Each batch taken ends a step.
    With a prefetcher, each snapshot would therefore have the number of a later batch.

    Reading ahead can't be detected with certainty from inside. The sign is a first step without a gradient, followed by a step with one.
    """

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer], say: Callable[[str], None]) -> None:
        """Without an optimizer, nothing is reported. Create this object in the thread of the training loop."""
        self._optimizers, self._say = list(optimizers), say
        self._thread = threading.get_ident()
        self._left = _MOST + 1 if self._optimizers else 0
        """The number of steps that are still watched."""
        self._nodes = 0

    def gives(self) -> None:
        """Called right before the loop gets a batch."""
        if self._left:
            self._nodes = _nodes()

    def gave(self, reported: bool) -> None:
        """Called when the loop asks for the next batch. reported: the loop has reported figures for this step."""
        if not self._left:
            return
        first = self._left == _MOST + 1
        if reported or self._nodes != _nodes() or self._has_gradient():
            self._left = 0
            if not first:
                self._say(_READ_AHEAD)
        elif threading.get_ident() != self._thread:
            self._left = 0
            self._say(_READ_AHEAD)
        else:
            self._left -= 1

    def _has_gradient(self) -> bool:
        groups = (group for optimizer in self._optimizers for group in optimizer.param_groups)
        return any(parameter.grad is not None for group in groups for parameter in group["params"])


def _nodes() -> int:
    """Return the number of the next node that this thread adds to an autograd graph. A forward pass adds nodes, even if the optimizer skips
    its step or the gradients are already deleted."""
    return torch.autograd._get_sequence_nr()


class Beside:
    """Finds iterators that the loop continues from step to step, besides the batches that the session gives it."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say: Callable[[str], None] | None = say
        """The function that reports; None after the report."""
        self._made: list[weakref.ref[Any]] = []
        self._before: dict[int, Any] = {}
        """The progress of each iterator before the present step, by id."""
        self._moved: set[int] = set()
        """Ids of existing iterators that have given a batch within a step."""
        self._of_the_script = True
        """Whether iterators created now belong to the script. Between two steps the Session creates its own."""

    def made(self, iterator: Any) -> None:
        """Record that a DataLoader has created an iterator. Iterators of another library that replaces torch's are left out."""
        if self._say is not None and self._of_the_script and isinstance(iterator, _BaseDataLoaderIter):
            self._made.append(weakref.ref(iterator))

    def begins(self, used: Sequence[Any] | None = None) -> None:
        """Called when the loop asks for its first step. used: the loaders with persistent workers from which the Session takes batches; not
        None at the job's first start. Then iterators that the script has made before it made the Session are searched, too."""
        self._of_the_script = False
        if used is not None:
            known = [each() for each in self._made] + [each._iterator for each in used]
            found = (each for each in live_instances(_BaseDataLoaderIter) if not any(each is one for one in known))
            self._made += (
                weakref.ref(each) for each in found if {"_sampler_iter", "_num_yielded"} <= vars(each).keys()
            )

    def gives(self) -> None:
        """Called right before the loop gets a batch."""
        self._of_the_script = True
        self._made = [each for each in self._made if each() is not None]
        self._before = {id(each()): _reached(each()) for each in self._made}
        self._moved &= self._before.keys()

    def gave(self) -> None:
        """Called when the loop asks for the next batch."""
        self._of_the_script = False
        for iterator in (each() for each in self._made):
            known = self._before.get(id(iterator))
            if iterator is None or known is None or _reached(iterator) == known:
                continue
            order, given = _reached(iterator)
            if order != known[0] or given < known[1]:  # a new pass by persistent workers
                continue
            if self._say is not None and id(iterator) in self._moved:
                self._say(_GOES_ON.format(samples=type(iterator._dataset).__name__))
                self._say, self._made = None, []
                return
            self._moved.add(id(iterator))


def _reached(iterator: Any) -> tuple[int, int]:
    """Return the id of a torch iterator's pass, and the number of batches that it has given in that pass."""
    return id(iterator._sampler_iter), iterator._num_yielded
