"""Ranks that cannot start where they have trained before: whose fault that is, how long it is waited for, and what it must not hold up."""

from collections.abc import Callable, Collection

import pytest

from mt_resilient.resilience.membership.rank_assignment import TRUE_S
from mt_resilient.resilience.model.request import Wish
from mt_resilient.resilience.model.state_machine import Phase
from mt_resilient.resilience.model.types import NodeId
from mt_resilient.resilience.report.status_view import lines

from .cluster import Job, begun

AWAY = "FileNotFoundError: /data/train.bin"


def trains(job: Job, nodes: int) -> bool:
    record = job.world().record
    runs = record and record.phase is Phase.RUN and len(record.members) == nodes
    return bool(record and runs and job.node and job.node.ranks and job.ranks.step > max(0, record.resume_step))


def broken(job: Job, names: Collection[str], reached: Callable[[Job], bool], patience: int = 900) -> None:
    """Until that is reached, or the job is over: ranks raise as they start on one of these nodes."""
    failed = set[int]()
    for _ in range(patience):
        if job.exit_code is not None or reached(job):
            return
        job.tick()
        record = job.world().record
        here = [name for name in names if record and name in record.members]
        if record and record.phase is Phase.RUN and record.number not in failed and here:
            failed.add(record.number)
            job.ranks.raise_("RuntimeError: CUDA error", job.now_s + 0.5, on=job.nodes[NodeId(here[0])])
    raise AssertionError(job.transcript())


@pytest.mark.parametrize("nodes", ["1", "2"])
def test_agents_that_begin_anew_while_starts_wait_are_no_starts(nodes: str) -> None:
    job = begun(nodes=nodes, total=60)
    job.faults.import_error = AWAY
    job.kill_rank(1)
    for pause_s in (1, 5, 25, 125, 300):
        job.until_pause(pause_s)
        for name in job.names:
            job.kill_agent(name)
            job.start_agent(name)
            job.tick()
    job.faults.import_error = ""
    job.until(lambda job: trains(job, int(nodes)), patience=400)
    job.ends(samples=range(1, 61))


def test_a_node_breaks_that_trains_with_fewer_than_there_once_were() -> None:
    """The job has trained on three before: they are not too few."""
    job = begun(nodes="2:4", total=400)
    job.kill_node("d")
    job.until(lambda job: trains(job, 3), patience=200)
    job.kill_rank(4)
    broken(job, "c", lambda job: trains(job, 2))
    assert ([*job.world().quarantine], job.members) == (["c"], ["a", "b"]), job.transcript()


@pytest.mark.parametrize(("nodes", "spares", "dies"), [("3", 1, ""), ("2", 2, "b")])
def test_a_node_breaks_as_what_all_lacked_is_back(nodes: str, spares: int, dies: str) -> None:
    """A member's own mount stays away; or who takes a dead one's place is broken."""
    job = begun(nodes=nodes, spares=spares, total=60)
    job.faults.import_error = AWAY
    job.kill_rank(1)
    job.until_pause(5)
    job.faults.import_error = ""
    if dies:
        job.kill_node(dies)
    bad = "c" if dies else "b"
    broken(job, bad, lambda job: bad not in job.members and trains(job, int(nodes)))
    job.to_the_end()
    assert (job.exit_code, [*job.world().quarantine]) == (0, [bad]), job.transcript()


def test_a_node_that_is_shut_out_does_not_come_back_for_a_number_that_was_left() -> None:
    job = begun(nodes="1:2", total=60)
    job.kill_rank(3)
    broken(job, "b", lambda job: len(job.members) == 1)
    job.faults.import_error = AWAY
    broken(job, "b", lambda job: any(i.unfit == 1 for i in job.incidents.values()))
    job.faults.import_error = ""
    broken(job, "b", lambda job: False)
    assert (job.exit_code, job.last_state) == (0, tuple(range(1, 61))), job.transcript()


def test_a_number_that_was_left_is_tried_again_an_hour_later() -> None:
    """Nothing else has gone wrong since; and status tells why nobody joins."""
    job = begun(nodes="2:3", total=400)
    job.kill_node("c")
    job.until(lambda job: trains(job, 2), patience=200)
    job.start_agent("c")
    job.until(lambda job: len(job.members) == 3, patience=100)
    job.faults.import_error = AWAY
    job.until(lambda job: any(i.unfit == 3 for i in job.incidents.values()), patience=200)
    left_s = job.now_s
    job.faults.import_error = ""
    job.until(lambda job: trains(job, 2), patience=60)
    assert "starts on 3 nodes have failed" in " ".join(lines(job.world(), job.wall_s, str))
    job.wait(30)
    assert trains(job, 2)
    job.skew_s = TRUE_S - (job.now_s - left_s) - 10  # which nobody waits for here
    job.wait(5)
    assert trains(job, 2)
    job.until(lambda job: trains(job, 3))


@pytest.mark.parametrize("how", ["drain", "preemption"])
@pytest.mark.parametrize("name", ["b", "c"])
def test_nodes_leave_while_starts_wait(how: str, name: str) -> None:
    """A member, whose place the spare takes, or the spare: neither waits for a start that goes well."""
    job = begun(nodes="2", spares=1, total=40)
    job.faults.import_error = AWAY
    job.kill_rank(1)
    job.until_pause(125)
    asked_s = job.now_s
    if how == "drain":
        job.until_answered(job.order(Wish.DRAIN, node=name))
    else:
        job.preempt(name)
    job.until(lambda job: (node := job.nodes.get(NodeId(name))) is None or node.code is not None)
    assert job.now_s - asked_s < 10
    job.faults.import_error = ""
    job.until(lambda job: trains(job, 2), patience=400)
    job.ends(samples=range(1, 41))


def test_the_last_node_that_will_do_does_not_leave_while_starts_wait() -> None:
    """It ends the job, which is what it was asked for."""
    job = begun(nodes="1", total=40)
    job.faults.import_error = AWAY
    job.kill_rank(1)
    job.until_pause(125)
    job.preempt("a")
    job.ends(143)
