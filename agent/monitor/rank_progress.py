"""Follows what ranks report on their pages (shared memory), round by round → `Progress` of each rank.

A rank's silence counts only time in which the agent ran. While the agent was stopped, or its machine was suspended, it could not observe
the ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from ...resilience.detect.hang_rules import Progress
from ...resilience.ipc.board_layout import Page
from ...resilience.model.types import Doing, Rank, RankPhase

LONGEST_ROUND_S = 3.0
"""The most seconds between two rounds that count as time in which the agent ran. While the agent runs, its rounds are at most one second
apart."""
_WINDOW = 64


@dataclass
class _Heard:
    """What the agent knows about one rank."""

    sign: tuple[int, ...] = ()
    since_s: float = 0.0
    """The time at which `sign` changed last, in seconds of `awake_s`."""
    step: int = -1
    beat_ns: int = 0
    rewinds: int = 0
    done: int = 0
    slowest_s: float = 0.0
    """The longest silence, in seconds, before and during the rank's first steps."""
    steps_s: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))


class Hearing:
    def __init__(self, warmup_steps: int) -> None:
        self.awake_s = 0.0
        """Seconds that the agent has run so far, without time in which it was suspended."""
        self.gap_s = 0.0
        """Seconds between the last two rounds."""
        self._last_s = 0.0
        self._tells = False
        self._warmup_steps, self._warmup_s = warmup_steps, 0.0
        self._heard: dict[int, _Heard] = {}

    @property
    def warmup_s(self) -> float:
        """The longest silence, in seconds, before and during the first steps of a start: of this start if its first steps are over, else of
        an earlier one. 0: not known."""
        return max((h.slowest_s for h in self._heard.values() if h.done >= self._warmup_steps), default=self._warmup_s)

    def begin(self, tells: bool, warmup_s: float = 0.0) -> None:
        """Reset for new ranks. tells: whether the script is known to report its steps. Once a loop has begun, this stays known. warmup_s:
        the longest such silence on any node of the job, which counts if this agent has seen no start itself; 0: not known."""
        self._tells |= tells
        self._warmup_s = self.warmup_s or warmup_s
        self._heard = {}

    def listen(self, pages: Sequence[Page], living: Collection[int], now_s: float) -> dict[int, Progress]:
        """Read the ranks' pages, once in each round of the agent's loop. Return the progress of the living ranks, by local rank. now_s:
        monotonic."""
        self.gap_s, self._last_s = now_s - self._last_s, now_s
        self.awake_s += min(self.gap_s, LONGEST_ROUND_S)
        self._tells |= any(page.built_ns for page in pages)
        tells = self._tells or any(
            page.tells for page in pages
        )  # ranks without a loop yet, because another rank waits for them
        return {n: self._progress(n, pages[n], tells) for n in living}

    def _progress(self, local_rank: int, page: Page, tells: bool) -> Progress:
        heard = self._heard.setdefault(local_rank, _Heard(since_s=self.awake_s))
        step, beat_ns, rewinds = page.step, page.beat_ns, page.rewinds
        sign = (page.pid, page.phase, step, beat_ns, page.doing, page.built_ns, page.restored_ns, rewinds, page.left)
        if sign != heard.sign:
            if page.phase == RankPhase.TRAINING and heard.done < self._warmup_steps:
                heard.slowest_s = max(heard.slowest_s, self.awake_s - heard.since_s)
            heard.sign, heard.since_s = sign, self.awake_s
        if step > heard.step and rewinds == heard.rewinds:
            # Between two rounds a rank may finish many quick steps, also its first ones: use their average time.
            known, known_ns = heard.step, heard.beat_ns
            if known < 0 and page.stepped_ns:
                known, known_ns = page.first_step, page.stepped_ns
                heard.done = 1
            if 0 <= known < step:
                heard.steps_s.append((beat_ns - known_ns) / 1e9 / (step - known))
            heard.done += step - known if known >= 0 else 1
        heard.step, heard.beat_ns, heard.rewinds = step, beat_ns, rewinds
        return Progress(
            rank=Rank(page.rank if page.pid else local_rank),
            phase=RankPhase(page.phase),
            silent_s=self.awake_s - heard.since_s,
            doing=Doing(page.doing),
            done=heard.done,
            warmup_s=self._warmup_s,
            steps_s=heard.steps_s,
            tells=tells,
            turning=bool(rewinds) and page.rewind(rewinds).done_ns > beat_ns,
        )
