"""Many episodes, on all cores: seeds → outcomes that violate something. A failing one is shrunk and told, with the command that replays it.

`python -m tests.simulation.campaign SEED` prints the episode of a seed, second by second.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from .episode import Episode, Outcome, draw, play, shrunk

_CHUNK = 50


@dataclass
class Count:
    """What was played."""

    episodes: int = 0
    seconds: int = 0
    """Simulated ones."""
    faults: Counter[str] = field(default_factory=Counter)
    endings: Counter[tuple[int, ...]] = field(default_factory=Counter)

    def __str__(self) -> str:
        rare = ", ".join(f"{name} {n}" for name, n in sorted(self.faults.items()))
        ends = ", ".join(f"{'+'.join(map(str, codes)) or 'none'}: {n}" for codes, n in self.endings.most_common(8))
        return f"{self.episodes} episodes, {self.seconds} simulated seconds; faults: {rare}; exit codes: {ends}"


def campaign(seeds: Sequence[int], most: int = 5) -> tuple[Count, list[Outcome]]:
    """Play them all, on every core; no more than `most` that violate something."""
    count, failed = Count(), []
    chunks = [seeds[at : at + _CHUNK] for at in range(0, len(seeds), _CHUNK)]
    with _workers() as workers:
        for outcomes in workers.imap(_play, chunks):
            for outcome in outcomes:
                count.episodes += 1
                count.seconds += outcome.ticks
                count.faults.update(moment.fault for moment in outcome.episode.moments)
                count.endings[outcome.exit_codes] += 1
            failed += [outcome for outcome in outcomes if outcome.violated]
            if len(failed) >= most:
                break
    return count, failed


def _workers() -> multiprocessing.pool.Pool:
    """Forked: they have imported what this process has."""
    return multiprocessing.get_context("fork").Pool(os.cpu_count())


def _play(seeds: Iterable[int]) -> list[Outcome]:
    return [outcome if outcome.violated else _short(outcome) for outcome in map(play, map(draw, seeds))]


def _short(outcome: Outcome) -> Outcome:
    """Without the text, which nobody will read."""
    return Outcome(outcome.episode, "", outcome.exit_codes, outcome.ticks)


def told(outcome: Outcome) -> str:
    """A violation, with the smallest episode that shows it and the command that plays it again."""
    smallest = play(shrunk(outcome.episode, outcome.invariant))
    seed = outcome.episode.seed
    return "\n".join(
        [
            outcome.violated,
            f"again, byte for byte: python -m pytest tests/simulation --seed {seed}",
            "",
            f"the episode: {outcome.episode}",
            "",
            f"the smallest that shows it: {smallest.episode}",
            "",
            _cut(smallest.transcript),
        ]
    )


def _cut(transcript: str) -> str:
    lines = transcript.splitlines()
    return "\n".join(lines if len(lines) < 120 else [*lines[:80], "…", *lines[-30:]])


def whole(episode: Episode) -> str:
    """Everything about one episode."""
    outcome = play(episode)
    return f"{episode}\n\n{outcome.transcript}\nexit codes {outcome.exit_codes}; {outcome.violated or 'nothing is violated'}\n"


if __name__ == "__main__":
    sys.stdout.write(whole(draw(int(sys.argv[1]))))
