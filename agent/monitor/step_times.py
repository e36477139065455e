"""Watches for slow ranks: each rank's own time per step (without waiting for other ranks), from its page → samples → which ranks became
stragglers, and which no longer are."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ...resilience.detect import straggler
from ...resilience.detect.straggler import Answer, Sample, Slow, Spent, StragglerPolicy
from ...resilience.ipc.board_layout import Page
from ...resilience.model.signals import Straggler
from ...resilience.model.types import Rank, RankPhase, Step


class Strides:
    def __init__(self, policy: StragglerPolicy) -> None:
        self._policy = policy
        self.begin()

    def begin(self) -> None:
        """Reset for new ranks."""
        self.stragglers: tuple[Straggler, ...] = ()
        """The present stragglers, for the status."""
        self.newest: Sample = ()
        """The times that each local rank now needs for a step, for the metrics; empty: not known."""
        self._history: deque[Sample] = deque(maxlen=self._policy.baseline_samples + self._policy.window_samples)
        self._usual: dict[int, float] = {}
        self._calm: dict[int, Sequence[Sample]] = {}
        """By rank: samples from before the rank became slow. After the rank has recovered, it is compared with these samples, not with its
        slow ones."""
        self._last: list[tuple[int, ...]] = []
        self._last_s = 0.0
        self._turns = -1

    def look(self, pages: Sequence[Page], now_s: float, wall_s: float) -> bool:
        """Take a sample, if it is time, and evaluate it. Return True if a rank has become a straggler, or is no longer one. now_s:
        monotonic."""
        if not self._policy.enabled or len(pages) < 2:
            return False
        sample = self._sample(pages, now_s)
        if sample is None:
            return False
        self.newest = sample
        self._history.append(sample)
        before, history = self.stragglers, tuple(self._history)
        self.stragglers = tuple(told for told in before if not self._over(pages, told))
        if before and not self.stragglers:
            calm, window = self._calm[before[0].rank], history[-self._policy.window_samples :]
            self._history.clear()
            self._history.extend((*calm, *window))
        known = {told.rank for told in self.stragglers}
        for place, page in enumerate(pages):
            found = straggler.look(history, place, self._policy) if Rank(page.rank) not in known else None
            if found and found.answer is Answer.CERTAIN:
                self._usual[page.rank] = found.usual or 1.0
                self._calm[page.rank] = history[: -self._policy.window_samples]
                self.stragglers = (*self.stragglers, _told(page, found, wall_s))
        return self.stragglers != before

    def _over(self, pages: Sequence[Page], told: Straggler) -> bool:
        place = next(n for n, page in enumerate(pages) if page.rank == told.rank)
        return straggler.over(tuple(self._history), place, self._usual[told.rank], self._policy)

    def _sample(self, pages: Sequence[Page], now_s: float) -> Sample | None:
        """Return each rank's average times per step since the last sample. None: it is too early for a sample, or the ranks do not all
        train."""
        seen = [page.spent for page in pages]
        turns = sum(page.rewinds for page in pages)
        if not self._last or turns != self._turns or any(page.phase != RankPhase.TRAINING for page in pages):
            self._last, self._last_s, self._turns = seen, now_s, turns
            return None
        if now_s - self._last_s < self._policy.sample_s:
            return None
        grown = [tuple(b - a for a, b in zip(*pair, strict=True)) for pair in zip(self._last, seen, strict=True)]
        if any(steps < 1 for *_, steps in grown):
            return None
        self._last, self._last_s = seen, now_s
        return [Spent(*(ns / 1e9 / steps for ns in times)) for *times, steps in grown]


def _told(page: Page, found: Slow, wall_s: float) -> Straggler:
    return Straggler(
        rank=Rank(page.rank),
        at_s=wall_s,
        step=Step(page.step),
        own_s=round(found.own_s, 6),
        peers_s=round(found.peers_s, 6),
        usual=round(found.usual, 3),
        lost=found.lost,
    )
