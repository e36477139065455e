"""What is measured becomes a stride, and a time for the next snapshot on disk."""

from itertools import pairwise
from typing import Any

import pytest

from mt_resilient.agent.snapshots.saving import FIRST_S, Pacing
from mt_resilient.checkpoint.durable.save_interval import AUTO, MOST_S
from mt_resilient.training.snapshot.snapshot_pace import Pace


def measured(
    pace: Pace,
    *,
    step_s: float,
    held_s: float,
    longer_s: float = 0.0,
    noticed_later: bool = False,
    waited_s: float = 0.0,
) -> int:
    """Take snapshots at the pace's own stride. longer_s: by how much the step beside the copies is longer, or the step after it."""
    for _ in range(12):
        pace.recorded(held_s)
        for number in range(pace.stride):
            longer = number == noticed_later
            pace.stepped(step_s + longer_s * longer, beside=(longer_s or waited_s) > 0 and number == 0)
        pace.waited(waited_s)
    return pace.stride


def test_what_the_user_has_fixed_stays() -> None:
    assert measured(Pace(4), step_s=1.0, held_s=1.0) == 4


def test_every_step_until_enough_is_known_and_one_slow_snapshot_is_no_rule() -> None:
    pace = Pace(AUTO)
    assert pace.stride == 1
    pace.recorded(30.0)
    assert pace.stride == 1
    assert measured(pace, step_s=1.0, held_s=0.005) == 1


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        ({"held_s": 0.002}, 4),  # a CPU: nothing runs beside the step
        ({"held_s": 0.001, "longer_s": 0.032}, 60),  # two H100: a step of 93 ms takes 125 ms beside copies
        (
            {"held_s": 0.001, "longer_s": 0.032, "noticed_later": True},
            60,
        ),  # the loop waits for its device before the optimizer's step
        ({"held_s": 0.001, "waited_s": 0.032}, 60),  # the loop never waits for its device, and only the device tells
        ({"held_s": 0.0, "longer_s": 0.0005, "waited_s": 0.0005}, 1),  # hidden
        ({"held_s": 0.001, "longer_s": -0.05}, 2),  # a step that happens to be shorter takes nothing away
    ],
)
def test_all_that_steps_take_longer_counts_and_stays_below_its_share(figures: dict[str, Any], expected: int) -> None:
    assert measured(Pace(AUTO), step_s=0.093, **figures) == expected


@pytest.mark.parametrize(("first_s", "later_s", "expected"), [(0.0005, 0.03, 118), (0.03, 0.03, 118)])
def test_a_script_that_begins_to_learn_gets_its_snapshots_as_often_as_its_longer_steps_afford(
    first_s: float, later_s: float, expected: int
) -> None:
    """The first steps of a reinforcement learner only fill its replay buffer."""
    pace = Pace(AUTO)
    for step in range(1, 2000):
        pace.stepped(first_s if step <= 100 else later_s)
        if pace.due(step, pace.stride):
            pace.recorded(0.02)
            pace.last = step
    assert 1999 - pace.last <= expected


def test_while_every_step_runs_beside_copies_some_are_left_free_to_compare_with() -> None:
    pace = Pace(AUTO)
    for stride in (1, 2, 4, 8):
        pace.recorded(0.0)
        assert pace.stride == stride
        pace.stepped(0.125, beside=True)


@pytest.mark.parametrize("slow_steps", [0, 6])
@pytest.mark.parametrize("copies_steps", [0.5, 2.0, 3.5, 10.0])
def test_copies_that_take_many_steps_are_compared_with_steps_without_them(copies_steps: float, slow_steps: int) -> None:
    """Steps beside copies take 0.3 more. After slow first steps, for which there is no memory, snapshots begin."""
    pace, now, took, copied = Pace(AUTO), 0.0, [], [0.0, 0.0]
    for step in range(1, 801):
        beside = copied[-1] > now
        overlap = min(1.0, max(0.0, copied[-1] - now))
        took.append((5.0 if step <= slow_steps else 1.0) + 0.3 * overlap)
        now += took[-1]
        pace.stepped(0.1 * took[-1], beside=beside)
        if step > slow_steps and pace.due(step, pace.stride) and copied[-2] <= now:
            copied = [copied[-1], max(now, copied[-1]) + copies_steps]
            pace.recorded(0.0)
            pace.last = step
    assert sum(took[400:]) / 400 < 1.015
    assert len(took) - pace.last < 400, "snapshots go on"


def test_a_stride_that_is_measured_anew_each_time_adds_no_snapshots() -> None:
    pace, strides, taken = Pace(AUTO), (46, 45, 44, 48), []
    for step in range(1, 500):
        if pace.due(step, strides[step % 4]):
            taken.append(step)
            pace.last = step
    assert all(after - before >= 44 for before, after in pairwise(taken))
    assert [step for step in range(1, 13) if Pace(4).due(step, 4)] == [4, 8, 12], "as the user has set it"


def test_a_first_snapshot_on_disk_soon_and_then_by_the_figures() -> None:
    pacing = Pacing(devices=8, now_s=100.0)
    assert not pacing.due(100.0 + FIRST_S - 1)
    assert pacing.due(100.0 + FIRST_S)
    assert not pacing.due(101.0 + FIRST_S)
    pacing.saved(0.5)
    now_s = 100.0 + 2 * FIRST_S
    assert pacing.due(now_s)
    assert not pacing.due(now_s + MOST_S[1] - 1)
    pacing.failures = 1000
    assert pacing.due(now_s + MOST_S[1])
    soon_s = next(s for s in range(1, 2000) if pacing.due(now_s + MOST_S[1] + s))
    assert soon_s < MOST_S[1] / 2, "a node that keeps failing is saved more often"
