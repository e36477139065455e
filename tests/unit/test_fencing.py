"""When an agent without a lease has to end its ranks."""

import pytest

from mt_resilient.agent.fencing import Pulse, Standing, fenced

NOW = 1000.0


@pytest.mark.parametrize(
    ("lease_left_s", "stepped_ago_s", "stride_s", "ends"),
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
    lease_left_s: float, stepped_ago_s: float, stride_s: float, ends: bool
) -> None:
    standing = Standing(
        lease_until_s=NOW + lease_left_s, ttl_s=10.0, proof=True, stepped_s=NOW - stepped_ago_s, stride_s=stride_s
    )
    assert fenced(NOW, standing) is ends


def test_the_pulse_knows_the_last_step_and_how_long_steps_take() -> None:
    pulse = Pulse()
    pulse.look(1, -1, 100.0)
    assert (pulse.stepped_s, pulse.stride_s) == (100.0, 0.0)
    for now_s, step in ((130.0, -1), (131.0, 0), (131.5, 0), (133.0, 1)):
        pulse.look(1, step, now_s)
    assert pulse.stepped_s == 133.0
    assert pulse.stride_s == pytest.approx(0.8 * 31.0)  # what was long is forgotten by and by
    pulse.look(2, -1, 140.0)
    assert (pulse.stepped_s, pulse.stride_s) == (140.0, 0.0)


@pytest.mark.parametrize(("lease_left_s", "ends"), [(1.0, False), (-0.1, True)])
def test_where_others_would_do_by_themselves_the_lease_alone_counts(lease_left_s: float, ends: bool) -> None:
    standing = Standing(lease_until_s=NOW + lease_left_s, ttl_s=10.0, proof=False, stepped_s=NOW - 0.1, stride_s=0.1)
    assert fenced(NOW, standing) is ends
