"""Episodes with somebody at another terminal who orders the job about."""

from collections.abc import Callable

import pytest

from mt_resilient.resilience.errors import SnapshotError, UsageError
from mt_resilient.resilience.model.request import Wish
from mt_resilient.resilience.model.types import Step

from .cluster import Job

Golden = Callable[[str], None]


def ends(job: Job, *samples: int) -> None:
    """In order, having used these samples."""
    job.ends()
    assert job.last_state == samples, job.transcript()
    assert [i.id for i in job.incidents.values() if i.open] == []


def test_sent_back_with_data_left_out(golden: Golden) -> None:
    """The ranks are sent back, and data is left out; a rank that is killed afterwards finds the same course again."""
    job = Job(kill_at={9: 1})
    job.until_step(6)
    asked = job.order(Wish.REWIND, step=Step(4), skip=2)
    job.until_answered(asked)
    assert job.world().answers[asked].exit_code == 0
    ends(job, 1, 2, 3, 4, *range(7, 15))
    golden(job.transcript())


def test_sent_where_nothing_is_kept(golden: Golden) -> None:
    """A step that is not kept is refused, with the nearest ones that are; the training takes no notice."""
    job = Job()
    job.until_step(6)
    asked = job.order(Wish.REWIND, step=Step(2))
    job.until_answered(asked)
    assert job.world().answers[asked].exit_code == UsageError.exit_code
    ends(job, *range(1, 13))
    assert not job.incidents
    golden(job.transcript())


def test_the_ranks_die_before_they_hear_the_order(golden: Golden) -> None:
    """The order stands: the next ranks begin where these were to go back."""
    job = Job(busy_at={7: 5})
    job.until_step(7)
    asked = job.order(Wish.REWIND, step=Step(4), skip=1)
    job.wait(2)
    job.kill_rank(0)
    job.until_answered(asked)
    ends(job, 1, 2, 3, 4, *range(6, 14))
    assert [(i.cause, i.rung) for i in job.incidents.values()] == [("ordered", 2), ("rank_killed", 2)]
    golden(job.transcript())


def test_the_agent_dies_before_the_ranks_hear_the_order(golden: Golden) -> None:
    """The order stands, and outlives the agent; the state that it names is on disk."""
    job = Job(busy_at={7: 30})
    job.until_step(7)
    asked = job.order(Wish.REWIND, step=Step(4))
    job.wait(2)
    job.kill_agent()
    job.tick()
    job.start_agent()
    job.until_answered(asked)
    assert job.world().answers[asked].exit_code == 0
    ends(job, *range(1, 13))
    golden(job.transcript())


def test_the_state_dies_with_the_agent(golden: Golden) -> None:
    """The state was in memory only: the order cannot be obeyed any more, which is told, and the job goes on from the newest state."""
    job = Job(busy_at={7: 30})
    job.until_step(7)
    asked = job.order(Wish.REWIND, step=Step(6))
    job.wait(2)
    job.kill_agent()
    job.tick()
    job.start_agent()
    job.until_answered(asked)
    assert job.world().answers[asked].exit_code == SnapshotError.exit_code
    ends(job, *range(1, 13))
    golden(job.transcript())


def test_a_long_pause(golden: Golden) -> None:
    """While the ranks wait, etcd goes and comes, the agent is killed, and a rank; none of them does a step before it is told to."""
    job = Job()
    job.until_step(6)
    job.until_answered(job.order(Wish.PAUSE))
    reached = job.ranks.step
    job.until_answered(job.order(Wish.SNAPSHOT))
    job.stop_store()
    job.wait(20)
    job.start_store()
    job.kill_rank(1)
    job.until(lambda job: bool(job.node and job.node.ranks and job.ranks.group.generation == 2 and job.ranks.paused))
    job.kill_agent()
    job.tick()
    job.start_agent()
    job.until(lambda job: bool(job.node and job.node.ranks and job.ranks.group.generation == 3 and job.ranks.paused))
    job.wait(20)
    assert job.ranks.step == reached
    job.until_answered(job.order(Wish.RESUME))
    ends(job, *range(1, 13))
    golden(job.transcript())


def test_drained_and_started_again(golden: Golden) -> None:
    """Before its maintenance the node takes a snapshot and leaves; the same command goes on from that very step."""
    job = Job()
    job.until_step(6)
    job.order(Wish.DRAIN, node="a")
    job.ends()
    reached = len(job.last_state)
    assert reached in job.disk
    assert job.computed == reached
    job.start_agent()
    ends(job, *range(1, 13))
    assert job.computed == 12
    golden(job.transcript())


@pytest.mark.parametrize("nodes", ["1", "2"])
@pytest.mark.parametrize("killed", [False, True])
def test_what_was_left_out_by_order_stays_out_when_the_command_is_given_again(killed: bool, nodes: str) -> None:
    """And the newest snapshot is from before the order."""
    job = Job(nodes=nodes, total=30, durable_every=8)
    job.until_committed(8)
    job.until_answered(job.order(Wish.REWIND, step=8, skip=2))
    job.until_step(10)
    if killed:
        for name in job.names:
            job.kill_agent(name)
        job.wait(12)
    else:
        job.ask_to_stop(snapshot=False)
        job.until(lambda job: job.exit_code is not None)
    assert max(job.disk) == 8
    job.start_agents()
    ends(job, *range(1, 9), *range(11, 33))
