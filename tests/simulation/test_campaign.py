"""Thousands of simulated jobs with drawn faults: none of them breaks an invariant."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .campaign import campaign, told, whole
from .episode import draw, play

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(0)
def test_no_episode_breaks_an_invariant(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> None:
    option = request.config.getoption
    seed, first = option("--seed"), option("--first")
    if seed is not None:
        with capsys.disabled():
            print(f"\n{whole(draw(seed))}")
        outcome = play(draw(seed))
        assert not outcome.violated, outcome.violated
        return
    count, failed = campaign(range(first, first + option("--episodes")))
    print(count)
    assert not failed, "\n\n".join(
        [told(failed[0]), *(f"seed {o.episode.seed}: {o.violated[:200]}" for o in failed[1:])]
    )


@pytest.mark.parametrize("seed", [1, 7, 42])
def test_a_seed_gives_the_same_bytes_in_every_process(seed: int) -> None:
    said = [
        subprocess.run(
            [sys.executable, "-m", "tests.simulation.campaign", str(seed)],
            cwd=ROOT,
            env=os.environ | {"PYTHONHASHSEED": order},
            capture_output=True,
            check=True,
            timeout=120,
        ).stdout
        for order in ("1", "2")
    ]
    assert said[0] == said[1]
    assert said[0].decode() == whole(draw(seed))
