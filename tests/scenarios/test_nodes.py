"""Episodes of several nodes: one of them dies, is cut off, leaves or comes back, and another one takes its place, or none does."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from mt_resilient.resilience.membership.rank_assignment import NodesPolicy, sizes
from mt_resilient.resilience.model.generation import GenerationRecord
from mt_resilient.resilience.model.request import Wish
from mt_resilient.resilience.model.state_machine import Phase
from mt_resilient.resilience.model.types import NodeId, Step
from mt_resilient.resilience.plan.escalation import REPLACE_NODE, REPLAN, RESTART_GROUP, RecoveryPolicy
from mt_resilient.resilience.report.status_view import lines

from ..simulation.faults import bit_flips
from .cluster import START_S, Job, begun
from .node import LEASE_S

Golden = Callable[[str], None]

THREE_STARTS = RecoveryPolicy(failed_starts=3)


def ends_well(job: Job, *causes: str) -> None:
    """The job has ended with every sample used once and in order, all of it on disk, and these incidents, told to the end."""
    job.ends()
    assert job.last_state == job.disk[job.total] == tuple(range(1, job.total + 1)), job.transcript()
    assert [i.id for i in job.incidents.values() if i.open] == []
    assert job.causes == [*causes], job.transcript()


def until_running(job: Job, nodes: int) -> None:
    def runs(job: Job) -> bool:
        record = job.world().record
        return bool(record and record.phase is Phase.RUN and len(record.members) == nodes)

    job.until(runs, patience=400)


def test_two_nodes_undisturbed(golden: Golden) -> None:
    """Two nodes train, a third stands by, and nothing happens."""
    job = Job(nodes="2", spares=1)
    ends_well(job)
    golden(job.transcript())


def test_a_node_dies_and_a_spare_takes_its_place(golden: Golden) -> None:
    """A node loses its power: its peers wait in vain until its lease is over; then the spare takes its place, and all go on from disk."""
    job = begun(nodes="2", spares=1, total=16)
    job.kill_node("b")
    ends_well(job, "agent_lost")
    assert (job.members, job.rungs) == (["a", "c"], [REPLACE_NODE])
    golden(job.transcript())


def test_a_host_still_lists_a_snapshot_of_a_lineage_that_was_left(golden: Golden) -> None:
    """One node has lost its memory, and its host lists only the step 8 that the ranks have left: they go on from an older step, although
    the other node has a step 8 in its memory, for that one was computed from other data."""
    job = Job(nodes="2", total=16)
    job.until_committed(8)
    job.lists_late("b", 14)
    job.order(Wish.REWIND, step=Step(4), skip=1)
    job.until(lambda job: job.ranks.rewinds == 1 and job.ranks.step == 9)
    job.kill_agent("b")
    job.start_agent("b")
    job.until(lambda job: job.restored[-1].generation == 3)
    assert job.restored[-1].step == 4, job.transcript()
    job.ends(samples=[*range(1, 5), *range(6, 18)])
    golden(job.transcript())


def test_the_node_that_leads_dies(golden: Golden) -> None:
    """The first of the nodes dies, which led the job: another one leads, and the spare becomes the first."""
    job = begun(nodes="2", spares=1, total=16)
    job.kill_node("a")
    ends_well(job, "agent_lost")
    assert job.members == ["c", "b"]
    golden(job.transcript())


def test_a_rank_is_killed_on_one_of_two_nodes(golden: Golden) -> None:
    """A rank is killed: all go on from the memory of both nodes."""
    job = Job(nodes="2", spares=1)
    job.until_step(6)
    job.kill_rank(3)
    job.to_the_end()
    assert (job.members, job.rungs) == (["a", "b"], [RESTART_GROUP])
    golden(job.transcript())


def test_a_node_dies_and_the_job_goes_on_with_fewer(golden: Golden) -> None:
    """One or two nodes may train. One dies, the other goes on alone; the dead one comes back, and the job grows again."""
    job = begun(nodes="1:2", total=40)
    job.kill_node("b")
    job.until_phase(Phase.RUN, 2)
    assert job.members == ["a"]
    job.wait(4)
    job.start_agent("b")
    ends_well(job, "agent_lost", "moved")
    assert (job.members, job.rungs) == (["a", "b"], [REPLAN, REPLAN])
    golden(job.transcript())


def test_a_node_reboots_sooner_than_its_lease_is_over(golden: Golden) -> None:
    """It is another machine for all that etcd knows, so it waits until the last one's lease is over; then it has its place again."""
    job = begun(nodes="2", total=20)
    job.kill_node("b")
    job.tick()
    job.start_agent("b")
    ends_well(job, "agent_lost")
    assert (job.members, job.rungs) == (["a", "b"], [RESTART_GROUP])
    golden(job.transcript())


def test_the_script_does_not_start_on_fewer_and_the_next_smaller_number_will_do(golden: Golden) -> None:
    """Two to four nodes may train, but the script refuses three: when one dies, the job goes on with two, and grows to four again."""
    job = begun(nodes="2:4", total=40, refused=frozenset({3}))
    job.kill_node("d")
    job.until(lambda job: job.members == ["a", "b"], patience=90)
    job.wait(4)
    job.start_agent("d")
    ends_well(job, "agent_lost", *["script_raised"] * 5, "moved")
    told = [(i.unfit, i.pause_s) for i in job.incidents.values()]
    assert (job.members, told) == (["a", "b", "c", "d"], [(0, 0), (0, 0), (0, 1), (0, 5), (0, 25), (3, 0), (0, 0)])
    golden(job.transcript())


def test_the_script_does_not_start_on_fewer_and_the_node_is_waited_for(golden: Golden) -> None:
    """One or two nodes may train, but the script refuses one: it waits for the dead node to come back, and no budget runs out."""
    job = begun(nodes="1:2", total=40, refused=frozenset({1}))
    job.kill_node("b")
    job.until(lambda job: any(i.unfit for i in job.incidents.values()), patience=90)
    job.wait(700)
    record = job.world().record
    assert record
    assert (record.pause_s, job.now_s - record.opened_s) == (300, pytest.approx(91, abs=9))
    assert "or earlier if another number of nodes is available" in "".join(lines(job.world(), job.now_s, str))
    job.start_agent("b")
    job.until_phase(Phase.RUN, record.number + 1)
    ends_well(job, "agent_lost", *["script_raised"] * 8)
    assert [i.pause_s for i in job.incidents.values()] == [0, 0, 1, 5, 25, 0, 300, 300, 300]
    assert (job.members, job.rungs) == (["a", "b"], [REPLAN, *[RESTART_GROUP] * 7, REPLAN])
    golden(job.transcript())


def test_a_script_that_starts_nowhere_any_more_ends_the_job() -> None:
    """Not on fewer nodes, and then not on as many as it has trained on."""
    job = begun(nodes="1:2", total=40, policy=THREE_STARTS)
    job.faults.refused = frozenset({1, 2})
    job.kill_node("b")
    job.until(lambda job: any(i.unfit for i in job.incidents.values()))
    job.start_agent("b")
    job.ends(93)


def test_the_script_s_data_is_away_for_a_while(golden: Golden) -> None:
    """A rank is killed while nobody can read the data: no start goes well, on any node, and each waits longer, until it is there again. A
    rank that is killed soon after that has budgets of its own."""
    job = begun(nodes="2", total=20)
    job.faults.import_error = "FileNotFoundError: /data/train.bin"
    job.kill_rank(1)
    job.until_phase(Phase.GATHER, 5)
    job.faults.import_error = ""
    job.until_step(10)
    job.kill_rank(1)
    ends_well(job, "rank_killed", *["script_raised"] * 3, "rank_killed")
    assert [i.pause_s for i in job.incidents.values()] == [0, 0, 1, 5, 0]
    golden(job.transcript())


@pytest.mark.parametrize("back", [False, True])
def test_the_data_is_away_as_a_node_dies(back: bool) -> None:
    """That so few nodes are to blame is not concluded at once, nor that the one that is left is, when the other is back."""
    job = begun(nodes="1:2", spares=1, total=40)
    job.faults.import_error = "FileNotFoundError: /data/train.bin"
    job.kill_node(*"bc")
    job.until_pause(5)
    job.faults.import_error = ""
    for name in "bc" if back else "":
        job.start_agent(name)
    job.until_phase(Phase.RUN, 5)
    ends_well(job, "agent_lost", *["script_raised"] * 3, *["moved"] * back)
    assert [i.unfit for i in job.incidents.values() if i.unfit] == []
    assert not job.world().quarantine


def test_the_data_is_away_for_longer_as_a_node_dies() -> None:
    """No number of nodes is to blame, though each has been given up: the job goes on with few, grows, and shrinks as ever."""
    job = begun(nodes="1:4", total=200)
    job.faults.import_error = "FileNotFoundError: /data/train.bin"
    job.kill_node("d")
    job.until_pause(300)
    assert {i.unfit for i in job.incidents.values()} == {0, 1, 2, 3}
    job.faults.import_error = ""
    until_running(job, 3)
    job.start_agent("d")
    until_running(job, 4)
    job.kill_node("d")
    until_running(job, 3)
    job.to_the_end()
    assert (job.exit_code, len(job.world().quarantine)) == (0, 0), job.transcript()


def test_in_each_pause_a_node_is_lost() -> None:
    """What is seen while the next start waits changes nothing about how many have failed."""
    job = begun(nodes="2", spares=8, total=40)
    job.faults.import_error = "FileNotFoundError: /data/train.bin"
    job.kill_rank(1)
    for pause_s in (25, 125, 300):
        job.until_pause(pause_s)
        job.kill_node(job.members[1])
    job.until(lambda job: bool((r := job.world().record) and r.over), patience=400)
    job.ends(93)


@pytest.mark.parametrize(("name", "cause"), [("a", "agent_restarted"), ("b", "agent_lost")])
def test_an_agent_starts_again_while_starts_wait(name: str, cause: str) -> None:
    """The one that leads, or the other."""
    job = begun(nodes="2", total=40)
    job.faults.import_error = "FileNotFoundError: /data/train.bin"
    job.kill_rank(1)
    job.until_pause(25)
    since_s = job.now_s
    job.kill_agent(name)
    job.start_agent(name)
    job.until_pause(125)
    assert job.now_s - since_s > 25
    job.faults.import_error = ""
    job.ends(samples=range(1, 41))
    assert cause in job.causes


def test_the_data_is_away_from_one_node_whichever_it_is() -> None:
    """Two are shut out for it, and no third: it is not the nodes. Starts wait all the same."""
    job = begun(nodes="2", spares=4, total=40)
    failed: list[int] = []

    def fails(job: Job) -> bool:
        record = job.world().record
        if record and record.phase is Phase.RUN and record.number not in failed:
            failed.append(record.number)
            job.ranks.raise_(
                "FileNotFoundError: /data/train.bin", job.now_s + 0.5, on=job.nodes[job.world().members[0]]
            )
        return len(failed) == 6

    job.until(fails, patience=300)
    job.to_the_end()
    assert (job.exit_code, len(job.world().quarantine)) == (0, 2), job.transcript()


@pytest.mark.parametrize("moment", ["the leader dies", "a rewind", "a stop", "a spare comes"])
def test_what_comes_while_starts_wait(moment: str) -> None:
    job = begun(nodes="2", spares=1, total=20)
    job.faults.import_error = "FileNotFoundError: /data/train.bin"
    job.kill_rank(1)
    job.until_pause(25)
    job.faults.import_error = ""
    since_s = job.now_s
    match moment:
        case "the leader dies":
            job.kill_node("a")
        case "a rewind":
            job.order(Wish.REWIND, step=Step(3))
        case "a stop":
            job.order(Wish.STOP, exit_code=130)
        case "a spare comes":
            job.kill_node("b")
    then = Phase.ENDED if moment == "a stop" else Phase.RUN
    job.until(lambda job: bool((r := job.world().record) and r.phase is then))
    assert job.now_s - since_s < (5 if moment == "a stop" else 35), job.transcript()
    job.to_the_end()
    assert job.exit_code == (130 if moment == "a stop" else 0), job.transcript()


def test_a_rank_dies_while_the_job_may_grow(golden: Golden) -> None:
    """One of two nodes trains alone, and the other has come back when a rank is killed: it goes on from memory, and grows after that."""
    job = Job(nodes="1:2", total=40, durable_every=20)
    job.until_committed(20)
    job.kill_node("b")
    job.until_phase(Phase.RUN, 2)
    job.start_agent("b")
    job.until_step(25)
    job.kill_rank(0)
    ends_well(job, "agent_lost", "rank_killed", "moved")
    assert (job.members, job.rungs) == (["a", "b"], [REPLAN, RESTART_GROUP, REPLAN])
    assert job.incidents[(2, "0002")].resume_step == 24, job.transcript()
    golden(job.transcript())


def test_a_node_is_drained_and_a_spare_takes_its_place(golden: Golden) -> None:
    """A node is to be serviced: the ranks wait, their state goes to disk, the spare takes the place, and no step is computed again."""
    job = Job(nodes="2", spares=1, total=16)
    job.until_step(6)
    asked = job.order(Wish.DRAIN, node="b")
    job.until_answered(asked)
    ends_well(job, "moved")
    assert (job.members, job.computed) == (["a", "c"], 16)
    golden(job.transcript())


def test_an_agent_dies_and_its_neighbour_says_so(golden: Golden) -> None:
    """The agent of a node is killed while its host lives: the others' ranks raise, the neighbour tells etcd, nobody waits for the lease."""
    job = begun(nodes="3", spares=1, total=16)
    job.kill_agent("c")
    struck_s = job.now_s
    job.until(lambda job: job.members == ["a", "b", "d"])
    assert job.now_s - struck_s < 4
    job.to_the_end()
    golden(job.transcript())


def test_a_node_loses_etcd_and_the_others(golden: Golden) -> None:
    """A node is cut off from everything: its agent ends its ranks before it can hear that a spare has its place; then it stands by."""
    job = begun(nodes="2", spares=1, total=30)
    job.cut_off("b", etcd=True, peers=True)
    job.until_phase(Phase.RUN, 2)
    job.wait(8)
    job.mend_network()
    ends_well(job, "agent_lost")
    assert job.members == ["a", "c"]
    golden(job.transcript())


def test_a_node_loses_etcd_alone(golden: Golden) -> None:
    """A node does not reach etcd any more, and its ranks train on, so all others do: it is told, and its place is its own."""
    job = begun(nodes="2", spares=1, total=40)
    job.cut_off("b", etcd=True)
    job.until_step(32)
    job.mend_network()
    ends_well(job, "cut_off")
    assert (job.members, job.computed) == (["a", "b"], 40)
    golden(job.transcript())


def test_all_that_train_lose_etcd_and_more_stand_by_than_were_announced(golden: Golden) -> None:
    """Two nodes train and do not reach etcd; they finish steps, and so they know that nobody begins anything without them. Two others would
    do, but were not counted on: they wait, and do not begin."""
    job = begun(nodes="2", more=2, total=40)
    for name in "ab":
        job.cut_off(name, etcd=True)
    job.until_step(32)
    assert job.members == ["a", "b"]
    job.mend_network()
    job.to_the_end()
    assert (job.exit_code, len(job.last_state)) == (0, 40)
    golden(job.transcript())


def others_begin(job: Job) -> None:
    """The command is given on two nodes that have not trained, and they go on to the end of it."""
    job.start_agent(*"cd")
    job.to_the_end()
    assert (job.exit_code, job.members, job.last_state) == (0, ["c", "d"], tuple(range(1, 17)))


def test_all_that_train_die_and_more_stand_by_than_were_announced(golden: Golden) -> None:
    """That is not to be told from a lost way to etcd: somebody has to say it."""
    job = begun(nodes="2", more=2, total=16)
    job.kill_node(*"ab")
    job.wait(30)
    assert (job.watch.record and job.watch.record.number) == 1
    job.order(Wish.STOP)
    job.until(lambda job: job.exit_code is not None)
    others_begin(job)
    golden(job.transcript())


def test_all_that_trained_are_dead_and_the_command_is_given_on_other_nodes(golden: Golden) -> None:
    """Who gives the command again where no agent is left says that the ranks are dead: other nodes need not wait for those."""
    job = begun(nodes="2", more=2, total=16)
    job.kill_node(*"abcd")
    job.wait(12)
    others_begin(job)
    golden(job.transcript())


def test_a_node_that_has_lost_etcd_dies(golden: Golden) -> None:
    """A node does not reach etcd any more, and trains on; then it loses its power: no step is finished any more, and its place is given
    away."""
    job = begun(nodes="2", spares=1, total=40)
    job.cut_off("b", etcd=True)
    job.until_step(24)
    job.kill_node("b")
    struck_s = job.now_s
    job.until(lambda job: job.members == ["a", "c"])
    assert job.now_s - struck_s <= 6
    job.mend_network()
    ends_well(job, "cut_off", "agent_lost")
    golden(job.transcript())


def test_a_rank_dies_while_a_node_has_lost_etcd(golden: Golden) -> None:
    """A node does not reach etcd any more, and trains on; then a rank of another is killed: who cannot be told what to do is left out."""
    job = begun(nodes="2", spares=1, total=40)
    job.cut_off("b", etcd=True)
    job.until_step(24)
    job.kill_rank(0)
    job.until(lambda job: job.members == ["a", "c"])
    job.mend_network()
    job.ends(samples=range(1, 41))
    golden(job.transcript())


def test_the_node_that_leads_loses_etcd_alone(golden: Golden) -> None:
    """The node that leads does not reach etcd any more: another one leads, and nobody is replaced."""
    job = begun(nodes="2", spares=1, total=40)
    job.cut_off("a", etcd=True)
    job.until_step(32)
    job.mend_network()
    ends_well(job, "cut_off")
    assert (job.members, job.computed) == (["a", "b"], 40)
    golden(job.transcript())


def spare_dies(job: Job, place: Callable[[Job], bool]) -> None:
    """A node dies, and the spare that has its place dies too, as soon as it has come so far; a second spare takes it then."""
    job.until_committed(4)
    job.kill_node("b")
    job.until(place)
    job.kill_node("c")
    job.ends(samples=range(1, 17))
    assert job.members == ["a", "d"]
    assert not [i for i in job.incidents.values() if i.open]


def test_a_spare_dies_before_it_is_ready(golden: Golden) -> None:
    """The spare that was given the place of a dead node dies before it has said that it is ready: the next one gets the place."""
    job = Job(nodes="2", spares=2, total=16)

    def given(job: Job) -> bool:
        if job.now_s - START_S > 20:
            job.faults.stalled.add(NodeId("c"))
        return "c" in job.members

    spare_dies(job, given)
    golden(job.transcript())


def test_a_spare_dies_while_it_launches(golden: Golden) -> None:
    """The spare dies after it has said that it is ready, and before its ranks have come up: the others' ranks wait for them in vain."""
    job = Job(nodes="2", spares=2, total=16)
    spare_dies(job, lambda job: bool("c" in job.members and (r := job.world().record) and r.phase is Phase.LAUNCH))
    golden(job.transcript())


def test_a_spare_dies_while_its_ranks_come_up(golden: Golden) -> None:
    """The spare dies when its ranks are attached, and have not restored anything yet."""
    job = Job(nodes="2", spares=2, total=16)
    spare_dies(job, lambda job: bool("c" in job.members and (r := job.world().record) and r.phase is Phase.RUN))
    golden(job.transcript())


def test_a_spare_dies_while_replaying(golden: Golden) -> None:
    """The spare dies when its ranks compute again what the first death has cost: two incidents, and both are over at the end."""
    job = Job(nodes="2", spares=2, total=16)
    spare_dies(job, lambda job: bool((ranks := job.worlds.get(2)) and ranks.step == 6))
    golden(job.transcript())


def test_two_nodes_die_at_once(golden: Golden) -> None:
    """Two of three nodes lose their power together: two spares take their places, in one generation."""
    job = begun(nodes="3", spares=2, total=16)
    job.kill_node("a")
    job.kill_node("c")
    ends_well(job, "agent_lost")
    assert job.members == ["d", "b", "e"]
    golden(job.transcript())


def test_all_nodes_die(golden: Golden) -> None:
    """All nodes lose their power, the spare too, and come back: the job goes on from disk."""
    job = begun(nodes="2", spares=1, total=16)
    job.kill_node(*"abc")
    job.tick()
    job.start_agents()
    job.ends(samples=range(1, 17))
    golden(job.transcript())


def test_a_node_dies_and_nobody_can_take_its_place(golden: Golden) -> None:
    """Both nodes are needed, and one dies: the other waits until it is back, its memory empty, and they go on from disk."""
    job = begun(nodes="2", total=16)
    job.kill_node("b")
    job.wait(20)
    assert len(job.incidents) == 1
    job.start_agent("b")
    ends_well(job, "agent_lost")
    assert sum(job.incidents[(1, "0001")].phases_s.values()) > 20  # all the while nothing was trained
    golden(job.transcript())


def test_a_spare_dies_before_it_is_ready_and_was_the_only_node(golden: Golden) -> None:
    """One node trains, and dies; the spare that has its place dies before it is ready, and nobody of the generation is left: the next
    spare gets the place."""
    job = begun(nodes="1", spares=2, total=16)
    job.kill_node("a")
    job.until(lambda job: len(job.incidents) > 0)
    successor = job.members[0]
    assert successor in ("b", "c")
    job.kill_node(successor)
    ends_well(job, "agent_lost")
    assert job.members != [successor]
    golden(job.transcript())


def test_a_node_is_felt_then_missed_and_comes_back(golden: Golden) -> None:
    """A rank is killed, all start anew, and before they have, its node dies, which nobody can stand in for: it is one story, the node's."""
    job = begun(nodes="2", total=16)
    job.faults.stalled.add(NodeId("b"))
    job.kill_rank(2)
    job.wait(2)
    job.kill_node("b")
    job.faults.stalled.clear()
    job.until(lambda job: job.incidents[(1, "0001")].cause == "agent_lost")
    job.start_agent("b")
    ends_well(job, "agent_lost")
    golden(job.transcript())


def test_the_last_node_that_will_do_is_drained(golden: Golden) -> None:
    """A node is drained that the job cannot do without: it ends with a last snapshot, and the same command goes on from it."""
    job = Job(nodes="2")
    job.until_step(6)
    job.order(Wish.DRAIN, node="b")
    job.ends()
    reached = len(job.last_state)
    assert reached in job.disk
    job.start_agents()
    ends_well(job)
    assert job.computed == 12
    golden(job.transcript())


def test_all_nodes_are_taken_away_at_once(golden: Golden) -> None:
    """One to three nodes may train, and a scheduler takes all three away: no node is drained onto the others, which have no time for it;
    all take the last snapshot, and the same command goes on from it."""
    job = Job(nodes="1:3", durable_every=20)
    job.until_step(6)
    job.preempt("a", "b", "c")
    job.ends(143)
    assert (len(job.worlds), len(job.last_state) in job.disk) == (1, True)
    job.start_agents()
    ends_well(job)
    assert job.computed == 12
    golden(job.transcript())


def test_two_nodes_are_drained_at_once(golden: Golden) -> None:
    """Two of four nodes are taken away, and a spare is there: it takes one place, the job goes on with three, in one change of nodes."""
    job = Job(nodes="2:4", spares=1, total=20)
    job.until_step(6)
    job.preempt("b", "c")
    ends_well(job, "moved")
    assert (job.members, job.computed) == (["a", "e", "d"], 20)
    golden(job.transcript())


def test_one_node_is_drained_onto_its_spare(golden: Golden) -> None:
    """One node trains and another stands by: the first is drained, and the order is not taken for one to end the job when it has left."""
    job = Job(nodes="1", spares=1, total=16)
    job.until_step(6)
    job.until_answered(job.order(Wish.DRAIN, node="a"))
    ends_well(job, "moved")
    assert (job.members, job.computed) == (["b"], 16)
    golden(job.transcript())


def test_a_node_dies_while_etcd_is_away(golden: Golden) -> None:
    """A node dies while etcd does not answer: the others' ranks wait, and when it is back the spare takes the place."""
    job = begun(nodes="2", spares=1, total=16)
    job.stop_store()
    job.kill_node("b")
    job.wait(6)
    job.start_store()
    ends_well(job, "agent_lost")
    assert job.members == ["a", "c"]
    golden(job.transcript())


def test_etcd_is_away_for_longer_than_a_lease(golden: Golden) -> None:
    """etcd does not answer anybody for longer than leases live, and is back: the ranks have trained on, and who has them is there."""
    job = Job(nodes="2", spares=1, total=40)
    job.until_step(6)
    job.stop_store()
    job.wait(14)
    job.start_store()
    ends_well(job)
    assert job.computed == 40
    golden(job.transcript())


def test_an_agent_is_held_up_for_longer_than_its_lease(golden: Golden) -> None:
    """An agent does not run for a while, and its ranks do: nothing is done, and it goes on where it was."""
    job = begun(nodes="2", spares=1, total=40)
    job.faults.stalled.add(NodeId("b"))
    job.until_step(32)
    job.faults.stalled.clear()
    ends_well(job, "cut_off")
    assert (job.members, job.computed) == (["a", "b"], 40)
    golden(job.transcript())


def test_the_ranks_of_a_node_are_cut_off(golden: Golden) -> None:
    """The ranks of two nodes do not reach each other, though their agents reach etcd: they hang, nobody is blamed, and all start again."""
    job = begun(nodes="2", total=16)
    job.cut_off("b", peers=True)
    job.until(lambda job: bool(job.incidents))
    job.mend_network()
    ends_well(job, "rank_hung")
    golden(job.transcript())


@pytest.mark.parametrize("phase", [Phase.GATHER, Phase.LAUNCH, Phase.ENDING])
def test_the_leading_node_dies_in(phase: Phase, golden: Golden) -> None:
    """The node that leads dies in the middle of a recovery, or of the end: another one goes on where it stopped. At the end its part of the
    last state is lost with it: the job has not ended."""
    job = begun(nodes="2", spares=1, total=16)
    if phase is not Phase.ENDING:
        job.kill_rank(3)
    job.until_phase(phase, 1 if phase is Phase.ENDING else 2)
    job.kill_node("a")
    job.ends(samples=range(1, 17))
    golden(job.transcript())


def test_a_node_dies_at_the_end_when_its_part_is_written(golden: Golden) -> None:
    """The ranks are through, and a node dies that has written its part of the last state: the other one writes its own, and all is over."""
    job = Job(nodes="2", total=16)
    job.until_phase(Phase.ENDING, 1)
    job.kill_node("b")
    job.to_the_end()
    assert (job.exit_code, job.computed) == (0, 16)
    assert job.last_state == job.disk[16]
    golden(job.transcript())


def test_a_node_dies_at_the_end_and_comes_back(golden: Golden) -> None:
    """The ranks are through, and the node that was to commit their last state dies; nobody can take its place: it is waited for."""
    job = Job(nodes="2", total=16)
    job.until_phase(Phase.ENDING, 1)
    job.faults.disk_full = True
    job.wait(3)
    job.kill_node("a")
    job.faults.disk_full = False
    job.wait(12)
    job.start_agent("a")
    job.ends()
    assert job.last_state == job.disk[16]
    golden(job.transcript())


def test_a_node_that_held_the_copy_that_was_fetched_dies_next() -> None:
    """What took the first one's place has its part in its own memory now, though it is of a generation before its time."""

    def begun(number: int) -> GenerationRecord:
        job.until_phase(Phase.RUN, number)
        record = job.world().record
        assert record
        return record

    job = Job(nodes="3", spares=2, total=40, durable_every=100)
    job.until_step(20)
    job.kill_node("b")
    second = begun(2)
    (source,) = second.sources.values()
    job.until(lambda job: job.worlds[2].step > second.resume_step)
    job.kill_node(source.holder)
    assert begun(3).resume_step == second.resume_step > 10, job.transcript()
    job.ends(samples=range(1, 41))


def test_the_spare_is_lost_while_it_takes_the_place_of_a_node_that_is_drained() -> None:
    """The job cannot do without either: the one that is there trains on, and goes when another has come."""
    job = Job(nodes="2", spares=1, total=60)
    job.until_step(6)
    asked = job.order(Wish.DRAIN, node="b")
    job.until_phase(Phase.GATHER, 2)
    job.kill_node("c")
    job.until(lambda job: job.members == ["a", "b"])
    job.until(lambda job: job.worlds[max(job.worlds)].step > 12)
    job.start_agent("c")
    job.until_answered(asked)
    assert job.members == ["a", "c"]
    ends_well(job, "moved", "agent_lost", "moved")


def test_a_host_that_was_replaced_by_another_of_its_name_leaves_when_it_is_back() -> None:
    """Cut off from everything, it was replaced, as a pod of a StatefulSet or a virtual machine is; then its network is mended."""
    job = begun(nodes="2", total=60)
    old = job.nodes[NodeId("b")]
    old.heartbeat._record = replace(old.heartbeat._record, home="another boot")
    job.kill_node("b")
    job.wait(14)
    job.start_agent("b")
    job.until_step(20)
    generation = max(job.worlds)
    codes = []
    for _ in range(2 * LEASE_S):
        job.tick()
        codes += [code] if not codes and (code := old.live(job.now_s)) is not None else []
    job.to_the_end()
    assert (codes, job.exit_code, max(job.worlds)) == ([2], 0, generation)


def given_anew(job: Job, nodes: str, spares: int = 0) -> None:
    """The command, with other numbers."""
    job.sizes, job.spares = sizes(nodes), spares
    job.seated = NodesPolicy(number=nodes, spares=spares, grow_after_s=5.0)


@pytest.mark.parametrize("trained", ["1", "1:2"])
def test_all_have_died_and_the_command_is_given_for_more_nodes(trained: str) -> None:
    """They come one after the other, and what was left of the job was on fewer than are allowed now."""
    job = begun(nodes=trained, spares=3 - max(sizes(trained)), total=40)
    for name in "ab" if trained == "1:2" else "":
        job.kill_node(name)
    job.until(lambda job: bool((r := job.world().record) and len(r.members) == 1 and r.phase is Phase.RUN))
    for name in "abc":
        if NodeId(name) in job.nodes:
            job.kill_node(name)
    job.wait(12)
    given_anew(job, "3")
    for name in "abc":
        job.start_agent(name)
        job.wait(2)
    job.until(lambda job: len(job.members) == 3)
    job.to_the_end()
    assert (job.exit_code, len(job.worlds[max(job.worlds)].record.members)) == (0, 3)


def test_all_have_died_and_the_script_does_not_start_on_the_number_that_is_given_now() -> None:
    """It has trained on another one, which is not allowed any more: there is nothing else to try."""
    job = begun(nodes="2", total=40, refused=frozenset({1}))
    job.kill_node(*"ab")
    job.wait(12)
    given_anew(job, "1")
    job.start_agent("a")
    job.ends(5)


def test_nodes_that_stood_by_are_started_again_while_those_that_train_have_lost_etcd() -> None:
    """More stand by than were announced: that the others are dead nobody has said who only starts an agent again."""
    job = begun(nodes="2", more=2, total=60)
    for name in "ab":
        job.cut_off(name, etcd=True)
    job.wait(12)
    for name in "cd":
        job.kill_agent(name)
    job.wait(12)
    for name in "cd":
        job.start_agent(name)
        job.tick()
    job.wait(15)
    job.mend_network()
    job.to_the_end()
    assert (job.exit_code, job.computed, max(job.worlds)) == (0, 60, 1)


def test_a_spare_is_started_again_just_when_etcd_is_there_again_for_all() -> None:
    """It is the first that is there; those that train are back a moment later."""
    job = begun(nodes="2", spares=1, total=60)
    job.kill_agent("c")
    for name in "abc":
        job.cut_off(name, etcd=True)
    job.wait(14)
    job.cut.etcd.discard(NodeId("c"))
    job.start_agent("c")
    job.tick()
    job.mend_network()
    job.to_the_end()
    assert (job.exit_code, job.computed, max(job.worlds)) == (0, 60, 1)


@pytest.mark.parametrize("dies", [False, True])
def test_the_way_to_etcd_is_lost_on_one_node_after_the_other_and_a_spare_is_started(dies: bool) -> None:
    """That the last one that led is cut off too, nobody was there to tell: both are waited for. dies: they have, and somebody says so."""
    job = begun(nodes="2", spares=1, more=1, total=40)
    job.kill_node(*"cd")
    for name in "ba":
        job.cut_off(name, etcd=True)
        job.wait(14)
    for name in "ab" if dies else "":
        job.kill_node(name)
    job.start_agent(*"cd")
    job.wait(20)
    job.mend_network()
    if dies:
        assert job.watch.record
        assert job.watch.record.number == 1
        job.order(Wish.STOP)
        job.until(lambda job: job.exit_code is not None)
        job.start_agents()
    job.to_the_end()
    assert (job.exit_code, job.computed > 40, max(job.worlds) > 1) == (0, dies, dies)


def test_a_spare_that_has_just_come_leaves_the_lead_to_who_need_not_wait() -> None:
    """Else the dead node would be answered only when its own lease is as old as one lives."""
    job = begun(nodes="1", spares=2, total=60)
    job.kill_node("b")
    job.wait(14)
    job.kill_node("a")
    struck_s = job.now_s
    job.wait(8)
    job.start_agent("b")
    job.until(lambda job: bool(job.watch.record and job.watch.record.number == 2))
    assert job.now_s - struck_s <= LEASE_S + 2
    job.to_the_end()


def test_all_die_before_they_go_back_and_not_as_many_come_as_are_wanted_now() -> None:
    job = Job(nodes="2", spares=1, total=40)
    job.until_step(10)
    bit_flips(job, 1)
    job.until(lambda job: bool((r := job.world().record) and r.rewind))
    job.kill_node(*"abc")
    job.wait(30)
    given_anew(job, "3")
    for name in "abc":
        job.start_agent(name)
        job.wait(30)
    job.to_the_end()
    assert (job.exit_code, len(job.members)) == (0, 3)


@pytest.mark.parametrize("spares", [0, 1])
def test_a_node_on_which_the_script_cannot_start_any_more_is_done_without(spares: int) -> None:
    """Its device is broken. Without another node it may be all nodes', and is tried again."""
    job = Job(nodes="2", spares=spares, total=30, policy=THREE_STARTS)
    job.until_step(6)
    for number in (1, 2, 3, 4)[: 4 - 2 * spares]:
        job.until_phase(Phase.RUN, number)
        job.ranks.raise_("RuntimeError: CUDA error", job.now_s + 0.5, on=job.nodes[NodeId("b")])
    job.to_the_end()
    assert (job.exit_code, job.members) == ((0, ["a", "c"]) if spares else (93, ["a", "b"]))


def broken_spares(job: Job, names: str) -> None:
    """A node dies, and the script cannot start on any of these that have its place in turn."""
    job.until_committed(4)
    job.kill_node("b")
    before = 1
    for name in names:

        def runs(job: Job, name: str = name, before: int = before) -> bool:
            record = job.world().record
            return bool(record and record.phase is Phase.RUN and record.number > before and name in job.members)

        job.until(runs)
        record = job.world().record
        assert record
        before = record.number
        job.ranks.raise_("RuntimeError: CUDA error", job.now_s + 0.5, on=job.nodes[NodeId(name)])
    job.to_the_end()


def test_two_broken_spares_have_a_place_in_turn(golden: Golden) -> None:
    """A node dies, and the spare that has its place is broken, as is the next one: each is shut out once the script has failed there and
    all are ready again, and the third trains. The same failure on nodes that are shut out is not the script's own."""
    job = Job(nodes="2", spares=3, total=16)
    broken_spares(job, "cd")
    assert (job.exit_code, job.members, job.rungs) == (0, ["a", "e"], [REPLACE_NODE] * 3)
    golden(job.transcript())


def test_two_nodes_break_at_once() -> None:
    """The second is known to be broken only when the script has failed there twice; by then it is not the script's own error."""
    job = Job(nodes="3", spares=2, total=30)
    job.until_step(6)
    for number, broken in enumerate("bbcc", 1):
        job.until_phase(Phase.RUN, number)
        job.ranks.raise_("RuntimeError: CUDA error", job.now_s + 0.5, on=job.nodes[NodeId(broken)])
    job.to_the_end()
    assert (job.exit_code, job.members) == (0, ["a", "d", "e"])


@pytest.mark.parametrize(("spares", "broken"), [(8, "cde"), (1, "ccc"), (2, "cdd")])
def test_a_script_that_starts_on_no_spare_ends_the_job(spares: int, broken: str) -> None:
    job = Job(nodes="2", spares=spares, total=16, policy=THREE_STARTS)
    broken_spares(job, broken)
    assert job.exit_code == 93
