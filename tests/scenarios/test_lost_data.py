"""etcd loses its data, or comes back with those of an older backup: who trains goes on, and what has been done stays done."""

from __future__ import annotations

from typing import Any

import pytest

from mt_resilient.resilience.model.node import AckKind
from mt_resilient.resilience.model.request import Wish
from mt_resilient.resilience.model.state_machine import Phase
from mt_resilient.resilience.model.types import NodeId

from ..simulation.faults import bit_flips
from .cluster import Job


def job(**more: Any) -> Job:
    """Two nodes that train, and one that stands by."""
    return Job(**{"nodes": "2", "spares": 1, "total": 80, **more})


def test_an_order_to_go_back_is_obeyed_although_its_number_would_come_again() -> None:
    episode = job()
    episode.until_step(10)
    episode.until_answered(episode.order(Wish.REWIND, step=8))
    episode.until_step(20)
    episode.lose_data()
    episode.wait(3)
    episode.until_answered(episode.order(Wish.REWIND, step=20))
    assert episode.ranks.rewinds == 2
    episode.to_the_end()


@pytest.mark.parametrize("before", ["a flipped bit", "an order"])
def test_replicas_that_go_apart_after_it_go_back(before: str) -> None:
    episode = job()
    episode.until_step(10)
    if before == "an order":
        episode.until_answered(episode.order(Wish.REWIND, step=8))
    else:
        bit_flips(episode, 1)
    episode.until(lambda job: job.ranks.rewinds == 1)
    episode.until_step(25)
    episode.lose_data()
    episode.wait(3)
    episode.until_step(32)
    bit_flips(episode, 1)
    episode.until(lambda job: job.ranks.rewinds == 2)
    episode.to_the_end()
    assert min(episode.last_state) > 0


def test_replicas_that_were_apart_long_before_are_not_answered_again() -> None:
    """Statuses go on telling of it."""
    episode = job()
    episode.until_step(6)
    episode.kill_rank(3)
    episode.until_phase(Phase.RUN, 2)
    episode.until_step(12)
    bit_flips(episode, 1)
    episode.until(lambda job: job.ranks.rewinds == 1)
    episode.until_step(30)
    ranks = episode.ranks
    episode.lose_data()
    episode.to_the_end()
    assert (ranks.rewinds, max(episode.worlds)) == (1, 2)


@pytest.mark.parametrize("phase", [Phase.RUN, Phase.GATHER, Phase.LAUNCH])
def test_a_backup_of_an_earlier_time_is_told_what_has_come_since(phase: Phase) -> None:
    """Of the generation before, or of the same while it began."""
    episode = job(total=60)
    episode.until_step(6)
    backup = episode.store.inner.range("").values()
    episode.kill_rank(3)
    if phase is not Phase.RUN:
        episode.until_phase(phase, 2)
        backup = episode.store.inner.range("").values()
    episode.until_phase(Phase.RUN, 2)
    episode.until_step(20)
    episode.lose_data(backup)
    episode.wait(5)
    episode.kill_rank(3)
    episode.to_the_end()
    assert episode.computed < 75


@pytest.mark.parametrize("third", [False, True])
def test_before_the_job_has_begun(third: bool) -> None:
    """Two of three nodes are there, and wait for the last one; it comes, or does not."""
    episode = job(nodes="2:3", spares=0, total=20)
    del episode.nodes[NodeId("c")]
    episode.wait(3)
    episode.lose_data()
    episode.wait(5)
    if third:
        episode.start_agent("c")
    episode.to_the_end()
    assert (episode.exit_code, len(episode.world().members)) == (0, 3 if third else 2)


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("loses", [False, True])
def test_data_that_was_left_out_by_order_stays_out(loses: bool, later: bool) -> None:
    """Although what the next ones begin with is from before the order. later: a generation after the one that has obeyed it."""
    episode = job(spares=2, total=24, durable_every=8)
    episode.until_committed(8)
    episode.until_answered(episode.order(Wish.REWIND, step=8, skip=2))
    episode.until_step(10)
    if later:
        episode.kill_rank(3)
        episode.until_phase(Phase.RUN, 2)
    episode.until_step(12)
    if loses:
        episode.lose_data()
        episode.wait(2)
    assert max(episode.disk) == 8
    episode.kill_node(*"ab")
    episode.to_the_end()
    assert not {9, 10} & {*episode.last_state}


def test_while_the_job_ends() -> None:
    """One node has said that it has, and says so again."""
    episode = job(spares=0, total=12)
    episode.until(lambda job: any(ack.kind is AckKind.ENDED for ack in job.world().acks.values()))
    assert len(episode.world().acks) == 2
    episode.lose_data()
    episode.ends()


def test_a_member_that_does_not_know_of_it_yet_is_waited_for() -> None:
    """Its agent is held up, and takes its lease for alive; the spare leads by now."""
    episode = Job(nodes="1", spares=1, total=30)
    episode.until_phase(Phase.RUN, 1)
    episode.lose_data()
    episode.tick()
    episode.faults.obeys_late_s = 6
    episode.to_the_end()
    assert (episode.exit_code, max(episode.worlds), episode.computed) == (0, 1, 30)


@pytest.mark.parametrize("nodes", ["1", "2"])
def test_spares_that_find_out_first_do_not_begin_without_those_that_train(nodes: str) -> None:
    """They register before a member has told the record again."""
    episode = Job(nodes=nodes, spares=2, total=30)
    episode.until_phase(Phase.RUN, 1)
    episode.until_step(5)
    episode.lose_data()
    for name in "abcd"[: int(nodes)]:
        episode.faults.stalled.add(NodeId(name))
    episode.wait(2)
    episode.faults.stalled.clear()
    for name in "abcd"[: int(nodes)]:
        episode.nodes[NodeId(name)].heartbeat._due_s = episode.now_s + 4
    episode.to_the_end()
    assert (episode.exit_code, max(episode.worlds), episode.computed) == (0, 1, 30)


def test_who_came_after_an_end_that_the_backup_lacks_leaves_and_can_come_again() -> None:
    """The number of the generation that had ended came again, and whoever waited for a later one never left."""
    episode = Job(total=30)
    episode.until_step(6)
    backup = episode.store.inner.range("").values()
    episode.ask_to_stop(snapshot=True)
    episode.until(lambda job: job.exit_code == 130)
    episode.start_agents()
    episode.lose_data(backup)
    episode.until(lambda job: job.exit_code == 3)
    episode.start_agents()
    episode.to_the_end()
    assert (episode.exit_code, len(episode.last_state)) == (0, 30)
