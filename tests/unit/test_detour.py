"""How much of a state is first copied within its device, from what the optimizer has waited."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mt_resilient.training import device
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
    assert not any(detour.divide(SIZES, lambda: (0, 0, 0)))
    detour.waited(waited_s, 0.120, 6 * GB)
    assert sum(detour.divide(SIZES, lambda: (free, 80 * GB, 0))) == away


def test_it_learns_on_and_counts_what_it_has_taken_as_free() -> None:
    detour = Detour()
    for free, away in ((26, 2), (24, 4), (22, 6), (19, 0), (26, 6)):
        detour.waited(0.022, 0.120, 6 * GB)
        assert sum(detour.divide(SIZES, lambda free=free: (free * GB, 80 * GB, 6 * GB))) == away


def test_only_what_the_allocator_still_holds_counts_as_free() -> None:
    detour = Detour()
    detour.waited(0.120, 0.120, 6 * GB)
    assert sum(detour.divide(SIZES, lambda: (24 * GB, 80 * GB, 0))) == 4
    assert sum(detour.divide(SIZES, lambda: (21 * GB, 80 * GB, 2 * GB))) == 3


def test_less_takes_it_after_snapshots_without_a_wait() -> None:
    detour = Detour()
    detour.waited(0.120, 0.120, 6 * GB)
    found = []
    for _ in range(20):
        found.append(sum(detour.divide(SIZES, lambda: (60 * GB, 80 * GB, 0))))
        detour.waited(0.0, 0.120, 6 * GB)
    assert found == sorted(found, reverse=True)
    assert (found[0], found[10]) == (6, 3)
    assert not any(detour.divide([*SIZES, GB], lambda: pytest.fail("asked")))


def test_a_snapshot_that_is_copied_before_the_loop_goes_on_teaches_nothing() -> None:
    detour = Detour()
    detour.waited(0.040, 0.120, 6 * GB)
    detour.waited(0.0, 0.120, 0)
    assert sum(detour.divide(SIZES, lambda: (60 * GB, 80 * GB, 0))) == 3


def test_a_wait_for_want_of_room_teaches_nothing() -> None:
    detour = Detour()
    detour.waited(0.040, 0.120, 6 * GB)
    for _ in range(5):
        assert not any(detour.divide(SIZES, lambda: (20 * GB, 80 * GB, 0)))
        detour.waited(0.040, 0.120, 6 * GB)
    assert sum(detour.divide(SIZES, lambda: (60 * GB, 80 * GB, 0))) == 3


def test_after_it_was_refused_nothing_takes_it_any_more() -> None:
    detour = Detour()
    detour.waited(0.120, 0.120, 6 * GB)
    detour.refused()
    for _ in range(2):
        assert not any(detour.divide(SIZES, lambda: pytest.fail("asked")))
        detour.waited(0.120, 0.120, 6 * GB)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, (60, 80, 0)),
        ({"memory_reserved": lambda where: 15, "memory_allocated": lambda where: 10}, (60, 80, 5)),
        ({"memory_reserved": lambda where: 15, "get_per_process_memory_fraction": lambda where: 0.5}, (25, 40, 0)),
    ],
)
def test_what_the_process_may_still_take_is_free(more: dict[str, Any], expected: tuple[int, int, int]) -> None:
    runtime = SimpleNamespace(mem_get_info=lambda where: (60, 80), **more)
    assert device.memory(runtime, torch.device("cpu")) == expected
    assert device.memory(SimpleNamespace(), torch.device("cpu")) == (0, 0, 0)


def test_the_device_is_asked_for_its_memory_only_if_something_would_come_too_late() -> None:
    detour = Detour()
    detour.divide(SIZES, lambda: pytest.fail("asked"))
    detour.waited(0.120, 0.120, 6 * GB)
    assert not any(detour.divide([], lambda: pytest.fail("asked")))
