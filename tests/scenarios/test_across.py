"""Replicas on several nodes, one rank on each: only who leads can see that they are apart."""

from collections.abc import Callable

import pytest

from mt_resilient.resilience.errors import SilentCorruption
from mt_resilient.resilience.plan.escalation import REWIND_IN_PLACE, STOP

from .cluster import Job


def flip(job: Job, rank: int) -> None:
    job.say(f"a bit of rank {rank}'s copy flips after step {job.ranks.step}")
    job.ranks.odd = frozenset([rank])


def test_a_bit_flips_on_one_of_three_nodes(golden: Callable[[str], None]) -> None:
    """The others know which one is wrong."""
    job = Job(nodes="3", ranks=1, total=60)
    job.until_step(40)
    flip(job, 2)
    job.to_the_end()
    [told] = job.incidents.values()
    assert (told.rung, told.nodes, told.onset) == (REWIND_IN_PLACE, ("c",), 41)
    assert (job.exit_code, job.last_state) == (0, tuple(range(1, 61)))
    golden(job.transcript())


def test_a_bit_flips_on_one_of_two_nodes(golden: Callable[[str], None]) -> None:
    """Which one nobody knows; from before it both compute the same again."""
    job = Job(nodes="2", ranks=1, total=60)
    job.until_step(41)
    flip(job, 1)
    job.to_the_end()
    [told] = job.incidents.values()
    assert (told.rung, told.nodes) == (REWIND_IN_PLACE, ("a", "b"))
    assert (job.exit_code, job.last_state) == (0, tuple(range(1, 61)))
    golden(job.transcript())


def test_it_flips_on_the_same_node_again_and_is_shut_out() -> None:
    job = Job(nodes="3", spares=1, ranks=1, total=120)
    for step in (40, 60):
        job.until_step(step)
        flip(job, 2)
        job.until(lambda job: not job.ranks.odd)
    job.ends(samples=range(1, 121))
    assert [*job.world().quarantine] == ["c"]


def test_after_the_third_time_nothing_wrong_is_left_on_disk() -> None:
    """And the same command, given again, ends with the right bits."""
    job = Job(nodes="2", ranks=1, total=100)
    for step in (40, 60):
        job.until_step(step)
        flip(job, 1)
        job.until(lambda job: not job.ranks.odd)
    job.until_step(82)
    flip(job, 1)
    job.to_the_end()
    last = [*job.incidents.values()][-1]
    assert (job.exit_code, last.rung) == (SilentCorruption.exit_code, STOP), job.transcript()
    assert 40 < max(job.disk) < last.onset
    job.start_agents()
    job.until_step(90)
    job.ends(samples=range(1, 101))


def test_a_stop_goes_before_the_answer_and_nothing_wrong_is_left_on_disk() -> None:
    job = Job(nodes="2", ranks=1, total=200)
    job.until_step(42)
    flip(job, 1)
    job.until_step(44)
    job.ask_to_stop(snapshot=True)
    job.ends(130)
    assert all(not kept.odd for step, kept in job.written.items() if step in job.disk), job.transcript()


@pytest.mark.parametrize("moment", ["a rank is killed", "the leader dies", "etcd is away", "the node dies", "pause"])
def test_what_happens_before_it_is_seen(moment: str) -> None:
    job = Job(nodes="2", spares=1, ranks=1, total=80)
    job.until_step(41)
    flip(job, 1)
    job.wait(2)
    match moment:
        case "a rank is killed":
            job.kill_rank(0)
        case "the leader dies":
            job.kill_agent("a")
        case "the node dies":
            job.kill_node("b")
        case "etcd is away":
            job.stop_store()
            job.wait(8)
            job.start_store()
        case "pause":
            pass
    job.ends(samples=range(1, 81))
