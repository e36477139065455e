"""What torchrun is told changes budgets: a job is never given up earlier than torchrun would give it up."""

import pytest

from mt_resilient.agent.policies import at_least
from mt_resilient.resilience.plan.escalation import RecoveryPolicy


@pytest.mark.parametrize(
    ("told", "same_failures", "without_progress"), [("", 2, 3), ("1", 2, 3), ("3", 4, 3), ("7", 8, 7), ("many", 2, 3)]
)
def test_as_many_restarts_as_torchrun_was_told(told: str, same_failures: int, without_progress: int) -> None:
    found = at_least(RecoveryPolicy(), told)
    assert (found.same_failure_at_start, found.max_without_progress) == (same_failures, without_progress)
