"""When an agent without a lease has to end its ranks."""

from dataclasses import replace

import pytest

from mt_resilient.agent.monitor.rank_progress import LONGEST_ROUND_S
from mt_resilient.agent.peers.fencing import Pulse, Standing, fenced

NOW = 1000.0


@pytest.mark.parametrize(
    ("lease_left_s", "still_s", "stride_s", "ends"),
    [  # steps prove something
        (1.0, 500.0, 0.0, False),  # with a lease nobody begins without it
        (0.0, 500.0, 0.0, False),
        (-0.1, 0.1, 0.1, False),  # all ranks are at work together
        (-100.0, 9.0, 0.1, False),
        (-100.0, 11.0, 0.1, True),
        (-0.1, 11.0, 0.1, True),
        (-0.1, 11.0, 5.0, False),  # steps take long
        (-0.1, 16.0, 5.0, True),
    ],
)
def test_only_ranks_that_stand_still_without_a_lease(
    lease_left_s: float, still_s: float, stride_s: float, ends: bool
) -> None:
    standing = Standing(
        lease_until_s=NOW + lease_left_s, ttl_s=10.0, proof=True, still_s=still_s, stride_s=stride_s, over=False
    )
    assert fenced(NOW, standing) is ends
    assert not fenced(NOW, replace(standing, over=True))  # they begin no step


def test_the_pulse_knows_the_last_step_and_how_long_steps_take() -> None:
    pulse = Pulse()
    pulse.look(1, (-1, 0), 100.0)
    assert (pulse.still_s, pulse.stride_s) == (0.0, 0.0)
    for now_s, step in ((102.0, -1), (104.0, -1), (105.0, 0), (105.5, 0), (107.0, 1), (108.5, 1)):
        pulse.look(1, (step, 0), now_s)
    assert pulse.still_s == 1.5
    assert pulse.stride_s == pytest.approx(0.8 * 5.0)  # what was long is forgotten by and by
    pulse.look(2, (-1, 0), 140.0)
    assert (pulse.still_s, pulse.stride_s) == (0.0, 0.0)


def test_a_slow_start_is_forgotten_with_the_steps_not_with_the_looks() -> None:
    """A node that was cut off right after a start of 25 s was waited for three times as long as five looks had left of it."""
    pulse = Pulse()
    for second in range(26):
        pulse.look(1, (-1, 0), 100.0 + second)
    for look, step in enumerate((0, 5, 10, 15, 20)):
        pulse.look(1, (step, 0), 126.0 + look)
    assert pulse.stride_s == 1.0


def test_while_the_agent_slept_nobody_stood_still() -> None:
    pulse = Pulse()
    pulse.look(1, (5, 0), 100.0)
    pulse.look(1, (5, 0), 400.0)
    assert pulse.still_s == LONGEST_ROUND_S


@pytest.mark.parametrize(("lease_left_s", "ends"), [(1.0, False), (-0.1, True)])
def test_where_others_would_do_by_themselves_the_lease_alone_counts(lease_left_s: float, ends: bool) -> None:
    standing = Standing(lease_until_s=NOW + lease_left_s, ttl_s=10.0, proof=False, still_s=0.1, stride_s=0.1, over=True)
    assert fenced(NOW, standing) is ends


def test_ranks_that_wait_together_do_not_stand_still() -> None:
    """Their step stays, and with each beat all of them have said that they wait."""
    pulse = Pulse()
    for tick in range(100):
        pulse.look(1, (7, tick), 100.0 + tick)
    assert pulse.still_s == 0.0
    for tick in range(4):
        pulse.look(1, (7, 99), 200.0 + tick)
    assert pulse.still_s == 4.0
