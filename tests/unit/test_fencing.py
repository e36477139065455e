"""When an agent without a lease has to end its ranks."""

import pytest

from mt_resilient.agent.monitor.rank_progress import LONGEST_ROUND_S
from mt_resilient.agent.peers.fencing import Pulse, fenced


@pytest.mark.parametrize(
    ("lease_left_s", "still_s", "stride_s", "proof", "ends"),
    [
        (1.0, 500.0, 0.0, True, False),  # the lease is valid, so no generation begins without this node
        (0.0, 500.0, 0.0, True, False),
        (-0.1, 0.1, 0.1, True, False),  # the ranks finish steps together
        (-100.0, 9.0, 0.1, True, False),
        (-100.0, 11.0, 0.1, True, True),
        (-0.1, 11.0, 0.1, True, True),
        (-0.1, 11.0, 5.0, True, False),  # steps take long
        (-0.1, 16.0, 5.0, True, True),
        (1.0, 0.1, 0.1, False, False),
        (-0.1, 0.1, 0.1, False, True),  # the other nodes can continue without a member: steps prove nothing
    ],
)
def test_ranks_end_without_a_lease_if_they_stand_still_or_their_steps_prove_nothing(
    lease_left_s: float, still_s: float, stride_s: float, proof: bool, ends: bool
) -> None:
    for over in (False, True):  # ranks whose loop is over begin no step
        known = {"lease_left_s": lease_left_s, "still_s": still_s, "stride_s": stride_s}
        assert fenced(**known, ttl_s=10.0, proof=proof, over=over) is (ends and not (proof and over))


def test_the_pulse_measures_the_time_since_the_last_step_and_the_longest_recent_step() -> None:
    pulse = Pulse()
    pulse.look(1, (-1, 0), 100.0)
    assert (pulse.still_s, pulse.stride_s) == (0.0, 0.0)
    for now_s, step in ((102.0, -1), (104.0, -1), (105.0, 0), (105.5, 0), (107.0, 1), (108.5, 1)):
        pulse.look(1, (step, 0), now_s)
    assert pulse.still_s == 1.5
    assert pulse.stride_s == pytest.approx(0.8 * 5.0)  # what was long is forgotten by and by
    pulse.look(2, (-1, 0), 140.0)
    assert (pulse.still_s, pulse.stride_s) == (0.0, 0.0)


def test_a_slow_start_decays_with_finished_steps_and_not_with_calls() -> None:
    """A node that was cut off right after a start of 25 s was waited for three times as long as five looks had left of it."""
    pulse = Pulse()
    for second in range(26):
        pulse.look(1, (-1, 0), 100.0 + second)
    for look, step in enumerate((0, 5, 10, 15, 20)):
        pulse.look(1, (step, 0), 126.0 + look)
    assert pulse.stride_s == 1.0


def test_time_in_which_the_agent_did_not_run_does_not_count_as_standing_still() -> None:
    pulse = Pulse()
    pulse.look(1, (5, 0), 100.0)
    pulse.look(1, (5, 0), 400.0)
    assert pulse.still_s == LONGEST_ROUND_S


def test_ranks_that_wait_in_a_pause_do_not_stand_still() -> None:
    """Their step stays, and with each beat all of them have said that they wait."""
    pulse = Pulse()
    for tick in range(100):
        pulse.look(1, (7, tick), 100.0 + tick)
    assert pulse.still_s == 0.0
    for tick in range(4):
        pulse.look(1, (7, 99), 200.0 + tick)
    assert pulse.still_s == 4.0
