"""Steps that are computed again: are their figures those of before?"""

import math

import pytest

from mt_resilient.resilience.ipc.board_events import PAGE_BYTES
from mt_resilient.resilience.ipc.board_layout import Page
from mt_resilient.resilience.ipc.handoff import Reached
from mt_resilient.resilience.model.signals import Repeated
from mt_resilient.training.boundary.repetition import Repetition

NAN = math.nan


def cleared() -> Page:
    page = Page(memoryview(bytearray(PAGE_BYTES)))
    page.clear(generation=1)
    return page


def seven_steps() -> tuple[Page, Repetition]:
    page = cleared()
    repetition = Repetition(page, None)
    for step in range(1, 8):
        repetition.crossed(step, 1 / step, NAN)
    return page, repetition


@pytest.mark.parametrize(
    ("before", "step", "figures", "found"),
    [
        (None, 7, (1.0, 2.0), Repeated.UNKNOWN),
        (Reached(7, 1.0, 2.0), 6, (1.0, 2.0), Repeated.UNKNOWN),
        (Reached(7, 1.0, 2.0), 7, (1.0, 2.0), Repeated.SAME),
        (Reached(7, 1.0, 2.0), 7, (math.nextafter(1.0, 2), 2.0), Repeated.OTHER),
        (Reached(7, 1.0, 2.0), 7, (1.0, NAN), Repeated.OTHER),
        (Reached(7, NAN, 2.0), 7, (1.0, 2.0), Repeated.SAME),
        (Reached(7, NAN, math.inf), 7, (1.0, 2.0), Repeated.UNKNOWN),
    ],
)
def test_the_replayed_step_after_a_restart_is_compared(
    before: Reached | None, step: int, figures: tuple[float, float], found: Repeated
) -> None:
    page = cleared()
    Repetition(page, before).crossed(step, *figures)
    assert page.repeated == found


def test_after_a_rewind_the_steps_before_the_onset_are_compared() -> None:
    page, repetition = seven_steps()
    repetition.went_back(3, onset=6)
    for step in (4, 5, 6):
        repetition.crossed(step, 1 / step if step < 6 else 9.0, NAN)
        assert page.repeated == Repeated.SAME
    repetition.went_back(4, onset=7)  # what was computed last is what is compared with
    repetition.crossed(5, 1 / 5, NAN)
    repetition.crossed(6, 1 / 6, NAN)
    assert page.repeated == Repeated.OTHER
    repetition.crossed(7, 1 / 7, NAN)
    assert page.repeated == Repeated.OTHER


def test_nothing_is_compared_after_a_rewind_to_other_data() -> None:
    page, repetition = seven_steps()
    repetition.went_back(3, onset=3)
    repetition.crossed(4, 9.0, NAN)
    assert page.repeated == Repeated.UNKNOWN
