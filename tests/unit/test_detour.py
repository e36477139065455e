"""How much of a state is first copied within its device, from what the optimizer has waited."""

import pytest

from mt_resilient.training.snapshot.detour import Detour

GB = 10**9
SIZES = [GB] * 6


@pytest.mark.parametrize(
    ("waited_s", "free", "away"),
    [
        (0.0, 60 * GB, 0),  # the copies are hidden
        (0.002, 60 * GB, 0),  # so short a wait is worth nothing
        (0.040, 60 * GB, 3),  # 40 of 120 ms: two of six, and a tenth more
        (0.120, 60 * GB, 6),
        (0.040, 22 * GB, 2),  # a quarter of 80 stays free
        (0.040, 20 * GB, 0),
        (0.040, 0, 0),  # a runtime that does not say
    ],
)
def test_as_much_as_would_come_too_late_if_there_is_room(waited_s: float, free: int, away: int) -> None:
    detour = Detour()
    assert not any(detour.divide(SIZES, lambda: (0, 0)))
    detour.waited(waited_s, 0.120, 6 * GB)
    assert sum(detour.divide(SIZES, lambda: (free, 80 * GB))) == away


def test_it_learns_on_and_counts_what_it_has_taken_as_free() -> None:
    detour = Detour()
    for free, away in ((26, 2), (24, 4), (22, 6), (19, 0), (26, 6)):
        detour.waited(0.022, 0.120, 6 * GB)
        assert sum(detour.divide(SIZES, lambda free=free: (free * GB, 80 * GB))) == away


def test_the_device_is_asked_for_its_memory_only_if_something_would_come_too_late() -> None:
    detour = Detour()
    detour.divide(SIZES, lambda: pytest.fail("asked"))
    detour.waited(0.120, 0.120, 6 * GB)
    assert not any(detour.divide([], lambda: pytest.fail("asked")))
