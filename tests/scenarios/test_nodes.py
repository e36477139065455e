"""Episodes of several nodes: one of them dies, is cut off, leaves or comes back, and another one takes its place, or none does."""

from collections.abc import Callable

from mt_resilient.resilience.machine import Phase
from mt_resilient.resilience.recovery import REPLACE_NODE, REPLAN, RESTART_GANG
from mt_resilient.resilience.signals import Wish

from .cluster import Job

Golden = Callable[[str], None]


def ends_well(job: Job, *causes: str) -> None:
    """The job has ended with every sample used once and in order, all of it on disk, and these incidents, told to the end."""
    job.to_the_end()
    assert job.exit_code == 0, job.transcript()
    assert job.last_state == job.disk[job.total] == tuple(range(1, job.total + 1)), job.transcript()
    assert [i.id for i in job.incidents.values() if i.open] == []
    assert tuple(i.cause for i in job.incidents.values()) == causes, job.transcript()


def members(job: Job) -> list[str]:
    record = job.world().record
    return [*record.members] if record else []


def rungs(job: Job) -> list[int]:
    return [incident.rung for incident in job.incidents.values()]


def test_two_nodes_undisturbed(golden: Golden) -> None:
    """Two nodes train, a third stands by, and nothing happens."""
    job = Job(nodes="2", spares=1)
    ends_well(job)
    golden(job.transcript())


def test_a_node_dies_and_a_spare_takes_its_place(golden: Golden) -> None:
    """A node loses its power: its peers wait in vain until its lease is over; then the spare takes its place, and all go on from disk."""
    job = Job(nodes="2", spares=1, total=16)
    job.until(lambda job: 4 in job.disk)
    job.kill_node("b")
    ends_well(job, "agent_lost")
    assert (members(job), rungs(job)) == (["a", "c"], [REPLACE_NODE])
    golden(job.transcript())


def test_the_node_that_leads_dies(golden: Golden) -> None:
    """The first of the nodes dies, which led the job: another one leads, and the spare becomes the first."""
    job = Job(nodes="2", spares=1, total=16)
    job.until(lambda job: 4 in job.disk)
    job.kill_node("a")
    ends_well(job, "agent_lost")
    assert members(job) == ["c", "b"]
    golden(job.transcript())


def test_a_rank_is_killed_on_one_of_two_nodes(golden: Golden) -> None:
    """A rank is killed: all go on from the memory of both nodes."""
    job = Job(nodes="2", spares=1)
    job.until_step(6)
    job.kill_rank(3)
    job.to_the_end()
    assert (members(job), rungs(job)) == (["a", "b"], [RESTART_GANG])
    golden(job.transcript())


def test_a_node_dies_and_the_job_goes_on_with_fewer(golden: Golden) -> None:
    """One or two nodes may train. One dies, the other goes on alone; the dead one comes back, and the job grows again."""
    job = Job(nodes="1:2", total=40)
    job.until(lambda job: 4 in job.disk)
    job.kill_node("b")
    job.until_phase(Phase.RUN, 2)
    assert members(job) == ["a"]
    for _ in range(4):
        job.tick()
    job.start_agent("b")
    ends_well(job, "agent_lost", "moved")
    assert (members(job), rungs(job)) == (["a", "b"], [REPLAN, REPLAN])
    golden(job.transcript())


def test_a_node_is_drained_and_a_spare_takes_its_place(golden: Golden) -> None:
    """A node is to be serviced: the ranks wait, their state goes to disk, the spare takes the place, and no step is computed again."""
    job = Job(nodes="2", spares=1, total=16)
    job.until_step(6)
    asked = job.order(Wish.DRAIN, node="b")
    job.until_answered(asked)
    ends_well(job, "moved")
    assert (members(job), job.computed) == (["a", "c"], 16)
    golden(job.transcript())


def test_an_agent_dies_and_its_neighbour_says_so(golden: Golden) -> None:
    """The agent of a node is killed while its host lives: the others' ranks raise, the neighbour tells etcd, nobody waits for the lease."""
    job = Job(nodes="3", spares=1, total=16)
    job.until(lambda job: 4 in job.disk)
    job.kill_agent("c")
    struck_s = job.now_s
    job.until(lambda job: members(job) == ["a", "b", "d"])
    assert job.now_s - struck_s < 4
    job.to_the_end()
    golden(job.transcript())


def test_a_node_loses_etcd_and_the_others(golden: Golden) -> None:
    """A node is cut off from everything: its agent ends its ranks before it can hear that a spare has its place; then it stands by."""
    job = Job(nodes="2", spares=1, total=30)
    job.until(lambda job: 4 in job.disk)
    job.cut_off("b", etcd=True, peers=True)
    job.until_phase(Phase.RUN, 2)
    for _ in range(8):
        job.tick()
    job.mend_network()
    ends_well(job, "agent_lost")
    assert members(job) == ["a", "c"]
    golden(job.transcript())


def test_a_node_loses_etcd_alone(golden: Golden) -> None:
    """A node does not reach etcd any more, and its ranks train on; without its lease its place is given away all the same."""
    job = Job(nodes="2", spares=1, total=30)
    job.until(lambda job: 4 in job.disk)
    job.cut_off("b", etcd=True)
    job.until_phase(Phase.RUN, 2)
    job.mend_network()
    ends_well(job, "agent_lost")
    golden(job.transcript())
