"""What is measured becomes a stride, and a time for the next snapshot on disk."""

from mt_resilient.agent.snapshots.save_schedule import FIRST_S, Pacing
from mt_resilient.checkpoint.durable.save_interval import AUTO, MOST_S
from mt_resilient.training.snapshot.snapshot_pace import Pace


def measured(pace: Pace, *, step_s: float, held_s: float, copied_s: float = 0.0) -> int:
    for _ in range(5):
        pace.stepped(step_s)
        pace.recorded(held_s)
        if copied_s:
            pace.copied(copied_s)
    return pace.stride


def test_what_the_user_has_fixed_stays() -> None:
    assert measured(Pace(4), step_s=1.0, held_s=1.0) == 4


def test_every_step_until_enough_is_known_and_one_slow_snapshot_is_no_rule() -> None:
    pace = Pace(AUTO)
    assert pace.stride == 1
    pace.recorded(30.0)
    assert pace.stride == 1
    assert measured(pace, step_s=1.0, held_s=0.009) == 1


def test_copies_cost_nothing_as_long_as_they_hide_under_the_step() -> None:
    assert measured(Pace(AUTO), step_s=0.267, held_s=0.002, copied_s=0.164) == 1
    assert measured(Pace(AUTO), step_s=0.150, held_s=0.001, copied_s=0.164) == 20, "29 ms stick out of a step of 150 ms"


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
