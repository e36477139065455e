"""Episodes of nodes that are to leave, while faults strike, and of what is ordered meanwhile."""

import pytest

from mt_resilient.resilience.errors import MachineError
from mt_resilient.resilience.model.request import Wish
from mt_resilient.resilience.model.state_machine import Phase
from mt_resilient.resilience.model.types import NodeId, Step
from mt_resilient.resilience.plan.escalation import REPLACE_NODE, REWIND_IN_PLACE

from ..simulation.faults import bit_flips
from .cluster import Job


def replaced(job: Job, node: str, *now: str) -> None:
    """It is preempted, these train without it, and it is there again."""
    job.preempt(node)
    job.until(lambda job: job.members == [*now] and job.nodes[NodeId(node)].code is not None)
    job.start_agent(node)


def drained_in_vain() -> Job:
    """b was to be drained onto c, which died: it trains on until another one comes."""
    job = Job(nodes="2", spares=1, total=200, durable_every=10)
    job.until_step(6)
    job.order(Wish.DRAIN, node="b")
    job.until(lambda job: bool(job.record.moving))
    job.kill_node("c")
    job.until(lambda job: not job.record.moving and job.record.phase is Phase.RUN)
    job.until(lambda job: job.members == ["a", "b"] and job.worlds[max(job.worlds)].step > 12)
    return job


def test_a_node_that_is_preempted_again_leaves_again() -> None:
    """Each life of its agent asks anew."""
    job = Job(nodes="2", spares=1, total=120)
    job.until_step(6)
    replaced(job, "b", "a", "c")
    job.until_step(30)
    replaced(job, "c", "a", "b")
    job.until_step(50)
    replaced(job, "b", "a", "c")
    job.ends(samples=range(1, 121))


def test_the_last_preemption_of_a_job_whose_nodes_were_preempted_before_takes_a_snapshot() -> None:
    job = Job(nodes="2", spares=1, total=120, durable_every=100)
    job.until_step(6)
    replaced(job, "b", "a", "c")
    job.until_step(20)
    job.preempt("c")
    job.until(lambda job: job.members == ["a", "b"])
    job.until_step(40)
    job.preempt("b")
    job.until(lambda job: job.exit_code is not None)
    assert len(job.last_state) in job.disk


@pytest.mark.parametrize("first", ["the fault", "the drain"])
def test_a_drain_costs_no_step_where_a_rank_dies_over_it(first: str) -> None:
    """What memory holds is of three nodes: they recover as three, and go on as two from there."""
    job = Job(nodes="2:3", total=60, durable_every=100)
    job.until_step(20)
    if first == "the fault":
        job.kill_rank(0)
        job.until(lambda job: job.record.number == 2)
    job.order(Wish.DRAIN, node="c")
    if first == "the drain":
        job.until(lambda job: bool(job.record.moving))
        job.kill_rank(0)
    job.until(lambda job: job.members == ["a", "b"] and job.record.phase is Phase.RUN)
    assert job.record.resume_step >= 18, job.transcript()
    job.ends(samples=range(1, 61))


def test_half_of_the_nodes_are_preempted_while_the_job_recovers() -> None:
    job = Job(nodes="2:4", total=60, durable_every=100)
    job.until_step(20)
    job.faults.stalled.add(NodeId("b"))
    job.kill_rank(0)
    job.until(lambda job: job.record.number == 2)
    job.preempt("c", "d")
    job.wait(2)
    job.faults.stalled.clear()
    job.until(lambda job: len(job.record.members) == 2 and job.record.phase is Phase.RUN)
    assert job.record.resume_step >= 18, job.transcript()


def test_a_node_is_drained_while_replicas_go_apart() -> None:
    """The ranks wait, and go back: what is to come to the disk is the state that they wait at since."""
    job = Job(nodes="2", spares=1, total=40, durable_every=10)
    job.until_step(12)
    job.order(Wish.DRAIN, node="b")
    job.until(lambda job: bool(job.record.moving))
    bit_flips(job, 1)
    job.until_phase(Phase.RUN, 2)
    job.to_the_end()
    assert (job.exit_code, job.rungs) == (0, [REWIND_IN_PLACE, REPLACE_NODE]), job.transcript()


def test_nodes_are_drained_before_the_first_step_while_the_ranks_are_paused() -> None:
    """There is no state that would have to come to the disk; and who says that the ranks are to go on is answered."""
    job = Job(nodes="1:4", spares=2, total=20, durable_every=5)
    paused = job.order(Wish.PAUSE)
    job.until_answered(paused)
    job.order(Wish.DRAIN, node="c")
    job.until(lambda job: bool(job.record.moving))
    job.until_answered(job.order(Wish.RESUME))
    job.to_the_end()
    assert (job.exit_code, "c" in job.members, job.computed) == (0, False, 20)


@pytest.mark.parametrize("later", [0, 1, 2])
def test_a_node_is_preempted_and_the_spare_goes_a_moment_later(later: int) -> None:
    """Their rack is taken away: what the ranks have done is on disk before, as where there was no spare."""
    job = Job(nodes="2", spares=1, total=100, durable_every=100)
    job.until_step(20)
    job.preempt("b")
    job.wait(later)
    job.nodes.pop(NodeId("c")).heartbeat.end()  # who stands by leaves at once, without a word
    for _ in range(25):
        if job.exit_code is None:
            job.tick()
    assert job.exit_code == 143
    assert max(job.disk, default=-1) >= 20, job.transcript()


def test_a_node_that_is_back_before_anything_was_launched_without_it_has_its_memory() -> None:
    """The spare that was to take its place has died over it."""
    job = Job(nodes="2", spares=1, total=90, durable_every=100)
    job.until_step(8)
    job.kill_node("a")
    job.until(lambda job: job.members == ["c", "b"] and job.worlds[max(job.worlds)].step > 12)
    job.start_agent("a")
    job.until_step(26)
    away = "c" if job.leads == "b" else "b"
    job.cut_off(away, etcd=True, peers=True)
    job.until(lambda job: "a" in job.members)
    held = max(step for step, kept in job.nodes[NodeId(away)].arena.items() if kept.sealed)
    job.kill_node("a")
    job.mend_network()
    job.until(lambda job: job.members == ["c", "b"] and job.record.phase is Phase.RUN)
    assert job.record.resume_step == held, job.transcript()


@pytest.mark.parametrize("kind", [Wish.SNAPSHOT, Wish.PAUSE, Wish.REWIND])
def test_a_drain_that_waits_holds_up_no_other_order(kind: Wish) -> None:
    job = drained_in_vain()
    asked = job.order(kind, **({"step": Step(10)} if kind is Wish.REWIND else {}))
    job.until_answered(asked)
    assert job.world().answers[asked].exit_code == 0


def test_a_node_whose_agent_is_another_one_meanwhile_is_not_told_to_be_drained() -> None:
    """The two that would change places lose their power, and the one that was to leave is back first."""
    job = Job(nodes="2", spares=1, total=80)
    job.until_step(6)
    asked = job.order(Wish.DRAIN, node="b")
    job.until(lambda job: bool(job.record.moving))
    job.kill_node("b")
    job.kill_node("c")
    job.wait(12)
    job.start_agent("b")
    job.until_answered(asked)
    answer = job.world().answers[asked]
    assert job.members == ["a", "b"]
    assert (answer.exit_code, "is drained" in answer.sentence) == (MachineError.exit_code, False)


@pytest.mark.parametrize("before", ["nothing", "a snapshot that does not come to the disk"])
def test_to_go_on_is_the_last_word_on_a_pause_that_has_not_begun(before: str) -> None:
    job = Job(nodes="2", total=60, durable_every=100)
    job.until_step(6)
    if before != "nothing":
        job.faults.disk_full = True
        job.order(Wish.SNAPSHOT)
        job.tick()
    job.order(Wish.PAUSE)
    job.until_answered(job.order(Wish.RESUME))
    job.faults.disk_full = False
    job.wait(30)
    assert not job.record.paused
