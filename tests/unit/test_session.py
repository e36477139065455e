"""A session outside of `mt-resilient run`."""

import pytest

from mt_resilient import Session
from mt_resilient.resilience.errors import UsageError


def test_a_loop_runs_as_if_it_were_not_there() -> None:
    session = Session()
    for _ in session.steps(3):
        with session.pausing("evaluation"):
            pass
        session.report(loss=1.0)


def test_it_pauses_for_what_has_a_budget_only() -> None:
    with pytest.raises(UsageError, match="not for 'lunch'"), Session().pausing("lunch"):
        pass


def test_it_begins_where_the_script_s_own_checkpoint_has_brought_it() -> None:
    assert [*Session().steps(5, start=3)] == [3, 4]
