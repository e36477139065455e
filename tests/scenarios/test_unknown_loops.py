"""A training loop that is not known: its ranks report no step, and it is never worse off than under torchrun alone."""

import pytest

from mt_resilient.agent.policies import at_least
from mt_resilient.resilience.errors import ScriptError
from mt_resilient.resilience.model.state_machine import Phase
from mt_resilient.resilience.plan.escalation import RecoveryPolicy

from .cluster import Job
from .node import HANG

BROKEN = "RuntimeError: CUDA error: an illegal memory access was encountered"


def trains(job: Job, start: int, seconds: int) -> None:
    job.until_phase(Phase.RUN, start)
    job.wait(seconds)


@pytest.mark.parametrize(("max_restarts", "starts"), [("", 2), ("0", 2), ("1", 2), ("3", 4), ("5", 6)])
def test_the_same_device_error_ends_the_job_no_earlier_than_under_torchrun(max_restarts: str, starts: int) -> None:
    """torchrun starts the ranks `--max-restarts` + 1 times. A device that fails in the same way may be another one each time."""
    job = Job(unknown=True, policy=at_least(RecoveryPolicy(), max_restarts))
    for start in range(1, starts + 1):
        assert job.exit_code is None, job.transcript()
        trains(job, start, 30)
        job.ranks.raise_(BROKEN, job.now_s + 0.5)
    job.ends(ScriptError.exit_code)
    assert job.causes == ["script_raised"] * starts


def test_the_same_device_error_now_and_then_does_not_end_the_job() -> None:
    job = Job(unknown=True, policy=RecoveryPolicy(unwatched_progress_s=60.0))
    for start in range(1, 4):
        trains(job, start, 60)
        job.ranks.raise_(BROKEN, job.now_s + 0.5)
    trains(job, 4, 5)
    job.ranks.end()
    job.ends()
    assert job.rungs == [2] * 3


def test_silence_is_no_hang() -> None:
    """However long, and although its stacks stand still. Neither is it one after a restart."""
    job = Job(unknown=True)
    for start in (1, 2):
        trains(job, start, int(10 * HANG.start_s))
        assert job.causes == ["rank_killed"] * (start - 1)
        if start == 1:
            job.kill_rank(1)
    job.ranks.end()
    job.ends()
