"""The campaign finds each planted bug. Without the bug, the same seed passes."""

import pytest

from .campaign import campaign
from .episode import draw, play
from .planted import BUGS

WITHIN = 5_000


@pytest.mark.parametrize("bug", BUGS)
def test_a_known_seed_shows_the_planted_bug(bug: str) -> None:
    seed, plant = BUGS[bug]
    with plant():
        assert play(draw(seed)).invariant
    assert not play(draw(seed)).violated


@pytest.mark.variant
@pytest.mark.parametrize("bug", BUGS)
def test_the_campaign_finds_the_planted_bug(bug: str) -> None:
    _, plant = BUGS[bug]
    with plant():
        _, found = campaign(range(WITHIN), most=3)
    outcome = next((each for each in found if each.invariant), None)  # it may also leave a job that never ends
    assert outcome, f"{WITHIN} seeds did not find it; instead: {[each.violated[:160] for each in found]}"
    print(f"{bug}: found after {outcome.episode.seed + 1} seeds: {outcome.violated[:160]}")
    clean = play(draw(outcome.episode.seed))
    assert not clean.violated, clean.violated
