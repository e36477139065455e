"""Several hosts, and what may befall them: whatever does, the weights are those of a run that nothing befell, and no two generations are at
work at once.

Faults come in turn in one job where that loses nothing. How soon each is answered, `benchmarks/detection.py` measures; the causes of the
incidents tell how it was found.
"""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mt_resilient.resilience.model.types import NodeId

from ..harness import FLIPPED, PLAIN, cli, undisturbed
from .hosts import Clocks, Cluster, train

pytestmark = pytest.mark.timing

Make = Callable[..., Cluster]


def undamaged(job: Cluster, steps: int) -> None:
    assert job.overlaps() == []
    assert job.digest() == undisturbed(PLAIN, "--steps", str(steps), ranks=1)[0]


def replaced(job: Cluster, name: str) -> None:
    """Another one trains in its place."""
    job.until(lambda: name not in job.members(), 120, f"somebody takes the place of {name}")
    job.goes_on()


def back(job: Cluster, name: str) -> None:
    """It stands by."""
    job.until(lambda: NodeId(name) in job.there(), 120, f"{name} is back")


def test_ranks_members_of_etcd_and_nodes_die(cluster: Make) -> None:
    options = ("--spares", "1", "--durable-every", "10", "--set", "agent.lease_ttl_s=10")
    job = cluster("4", *options, hosts=5, ranks=2, script=train(1200, 0.05))
    job.start()
    job.until_step(20)
    leader, *others = sorted(job.members(), key=lambda name: name != job.leader())
    job.after(lambda: job.kill_rank(others[0]))
    job.goes_on()
    job.net.kill("e2")
    job.after(lambda: job.kill_rank(others[1], local=1))
    job.goes_on()
    job.etcd.start("e2")
    job.after(lambda: job.net.off(leader))
    replaced(job, leader)
    job.start(leader)
    back(job, leader)
    taken = next(name for name in job.members() if name not in others)
    job.after(lambda: job.net.kill(taken))
    replaced(job, taken)
    assert job.finish(*(name for name in job.hosts if name != taken), deadline_s=600) == [0] * 4
    faults = [each for each in job.incidents() if each.rung]
    assert [each.rung for each in faults] == [2, 2, 3, 3]
    causes = [each.cause for each in faults]
    assert {*causes[:2]} <= {"rank_killed", "script_raised"}, causes  # the agents may first see a peer that raises
    assert causes[2:] == ["agent_lost"] * 2
    undamaged(job, 1200)


def test_the_network_is_cut(cluster: Make) -> None:
    """One node is cut off, then the one that leads, then the network falls in two: the half with most of etcd goes on, with as many nodes
    as it has, and grows when all are back."""
    options = ("--spares", "1", "--durable-every", "10", "--set", "nodes.grow_after_s=3")
    job = cluster("2:4", *options, hosts=5, script=train(1200, 0.05))
    job.start()
    job.until_step(20)
    for choose in (lambda: next(name for name in job.members() if name != job.leader()), job.leader):
        name = choose()
        job.after(lambda name=name: job.net.link(name, up=False))
        replaced(job, name)
        job.net.link(name, up=True)
        back(job, name)
    few = sorted(job.members(), key=lambda name: name != job.leader())[:2]
    job.net.apart("e1", *few)
    larger = {*job.hosts} - {*few}
    job.until(lambda: {*job.members()} == larger, 120, "the larger half goes on by itself")
    job.goes_on()
    for name in few:
        job.until(lambda name=name: job.said(name).count("so this agent ends its ranks"), 120, f"{name} ends its ranks")
    job.net.apart()
    job.until(lambda: len(job.members()) == 4, 120, "the job grows again")
    assert set(job.finish(*job.hosts, deadline_s=600)) == {0}
    undamaged(job, 1200)


@pytest.mark.variant
def test_clocks_slow_links_and_an_etcd_that_is_away_are_no_faults(cluster: Make, tmp_path: Path) -> None:
    """And a rank that dies while all clocks differ by minutes is answered as ever."""
    options = ("--spares", "1", "--durable-every", "10", "--set", "agent.lease_ttl_s=10")
    job = cluster("4", *options, hosts=5, script=train(900, 0.05))
    clocks = Clocks(job)
    job.start()
    job.until_step(20)
    clocks.set(job.leader(), 300)
    time.sleep(3)
    clocks.set(job.leader(), -300)
    time.sleep(3)
    for name, ahead_s in zip(job.hosts, (100, -100, 50, 0, -250), strict=True):
        clocks.set(name, ahead_s)
    job.kill_rank(next(name for name in job.members() if name != job.leader()))
    job.until(lambda: job.number() == 2, 30, "the ranks start again")
    job.goes_on()
    for name in job.hosts:
        clocks.set(name, 0)
    job.net.shape(job.members()[1], "2mbit")
    time.sleep(5)
    job.net.shape(job.members()[1], "1gbit")
    for name in ("e1", "e2"):
        job.net.kill(name)
    job.until(lambda: "etcd did not answer" in job.said(), 60, "the agents notice")
    before = job.steps()
    time.sleep(30)
    assert job.steps() > before + 100
    for name in ("e1", "e2"):
        job.etcd.start(name)
    assert set(job.finish(*job.hosts)) == {0}
    assert [each.cause for each in job.incidents() if each.rung] == ["rank_killed"]
    undamaged(job, 900)


@pytest.mark.variant
def test_agents_die_one_by_one_and_all_at_once_and_are_preempted_together(cluster: Make) -> None:
    """Before their leases are over: the one that leads, too. Then the same commands go on, from exactly where a preemption has left it."""
    options = ("--spares", "1", "--durable-every", "10", "--set", "agent.lease_ttl_s=60")
    job = cluster("2", *options, hosts=3, script=train(250, 0.05))
    job.start()
    job.until_step(20)
    for choose in (lambda: next(name for name in job.members() if name != job.leader()), job.leader):
        name = choose()
        job.after(lambda name=name: os.kill(job.agent(name), signal.SIGKILL))
        replaced(job, name)
        job.start(name)
        back(job, name)
    job.tell_all(signal.SIGKILL)
    assert again(job) > 0
    job.goes_on()
    asked_s = time.monotonic()
    job.tell_all(signal.SIGTERM)
    assert job.finish(*job.hosts) == [143] * 3
    assert time.monotonic() - asked_s < 30
    reached = max(step for _, step, _ in job.trail("done"))
    assert again(job) == reached + 1
    assert set(job.finish(*job.hosts)) == {0}
    undamaged(job, 250)


def again(job: Cluster) -> int:
    """The same commands on all hosts; the step that they go on from."""
    before = job.number()
    job.start()
    job.until(lambda: job.number() > before and job.at_work(), 120, "the same commands go on")
    return job.began()


@pytest.mark.variant
def test_nodes_are_drained_and_come_back(cluster: Make) -> None:
    options = ("--durable-every", "50", "--set", "nodes.grow_after_s=3")
    job = cluster("1:2", *options, hosts=2, script=train(200, 0.05))
    job.start()
    job.until_step(25)
    told = cli("drain", "n2", "--run-dir", str(job.place / "runs" / "n1"))
    assert (told.returncode, "the job continues on n1" in told.stdout) == (0, True), told
    assert job.finish("n2") == [0]
    job.goes_on()
    job.start("n2")
    job.until(lambda: job.members() == ["n1", "n2"], 120, "the job grows")
    assert set(job.finish("n1", "n2")) == {0}
    moved = [each for each in job.incidents() if each.rung]
    assert [each.cause for each in moved] == ["moved", "moved"]
    assert [each.lost_steps for each in moved] == [0, 0]
    undamaged(job, 200)


@pytest.mark.variant
def test_a_script_that_does_not_start_on_every_number_of_nodes(cluster: Make) -> None:
    """Not on three, nor on one: it goes on with two, then tries one now and then, and has its four again as soon as they are there."""
    options = ("--durable-every", "50", "--set", "nodes.grow_after_s=3", "--set", "recovery.failed_starts=2")
    job = cluster("1:4", *options, hosts=4, etcds=1, script=train(250, 0.05))
    job.extra = {name: {"REFUSED": "1,3"} for name in job.hosts}
    job.start()
    job.until_step(25)
    job.net.off("n4")
    job.until(lambda: len(job.members()) == 2, 120, "two go on")
    job.goes_on()
    gone = {"n1", "n2", "n3"} - {job.members()[0]}
    for name in gone:
        job.net.off(name)
    job.until(lambda: any(each.pause_s == 300 for each in job.incidents()), 120, "the next start on one waits")
    job.start("n4", *gone)
    job.until(lambda: len(job.members()) == 4, 120, "the job grows")
    assert set(job.finish(*job.hosts)) == {0}
    assert [each.unfit for each in job.incidents() if each.unfit] == [3, 1, 1]
    undamaged(job, 250)


@pytest.mark.variant
def test_all_nodes_set_aside_the_same_snapshots_at_once(cluster: Make) -> None:
    """The ranks go back behind all that is on disk, and each node takes it out of the world."""
    options = ("--durable-every", "1", "--set", "snapshots.keep=100")
    job = cluster("2", *options, hosts=2, etcds=1, script=train(120, 0.1))
    job.start()
    world = job.until_step(50)
    oldest = min(set.intersection(*({*said.durable_steps} for said in world.status.values())))
    told = cli("rewind", "--to", str(oldest), "--run-dir", str(job.place / "runs" / "n2"))
    assert told.returncode == 0, told
    assert set(job.finish("n1", "n2")) == {0}
    assert [(each.cause, each.rung) for each in job.incidents()] == [("ordered", 1)]
    undamaged(job, 120)


def test_what_a_dead_node_had_in_memory_comes_back_from_another_nodes(cluster: Make) -> None:
    """Nothing but the first snapshot is on disk. The ranks build while their part comes, over a slow link, and wait for it; a fault that
    strikes meanwhile, or the death of what fetches, begins the fetch anew."""
    options = (
        "--spares",
        "1",
        "--durable-every",
        "1000",
        "--set",
        "copies.every_s=0.5",
        "--set",
        "agent.lease_ttl_s=30",  # what n3 says to etcd shares its slow link with the fetch
    )
    job = cluster("2", *options, hosts=3, etcds=1, ranks=2, script=train(600, 0.05, ballast_mib=20))
    job.start()
    job.until_step(50)
    job.until(lambda: "of memory, and can replace another node at once" in job.said("n3"), 120, "n3 makes room")
    job.net.shape("n3", "6mbit")
    job.net.kill("n2")
    job.until(
        lambda: (n3 := job.status("n3")) and n3.built_s and not n3.restored_s, 120, "n3's ranks are built, and wait"
    )
    job.drain_process("n3").kill()
    job.until(lambda: "the drain process ended" in job.said("n3"), 60, "its death is seen")
    job.kill_rank("n1")
    job.net.shape("n3", "1gbit")
    assert set(job.finish("n1", "n3")) == {0}
    lost, killed = [each for each in job.incidents() if each.rung]
    assert lost.resume_step == killed.resume_step
    assert 0 < lost.lost_steps < 300
    assert job.said("n3").count("was fetched from another node's memory") == 1
    undamaged(job, 600)


@pytest.mark.variant
def test_a_bit_flips_on_one_of_three_nodes(cluster: Make, tmp_path: Path) -> None:
    """With one rank each, nobody but who leads can see it: the node is named, and all go back in place to before it, from memory."""
    options = ("--durable-every", "1000", "--set", "copies.every_s=3")
    job = cluster("3", *options, hosts=3, etcds=1, script=[str(FLIPPED), *train(760, 0.03)])
    flip = {"FLIP": "560:1:parameter", "FLIPPED": str(tmp_path / "flipped"), "GATE_AFTER": "10000"}
    job.extra |= dict.fromkeys(job.hosts, flip)
    job.start()
    assert job.finish(*job.hosts) == [0] * 3
    [told] = job.incidents()
    assert (told.cause, told.rung, told.nodes) == ("fingerprint_mismatch", 1, (NodeId(job.members()[1]),))
    assert told.resume_step is not None
    assert 400 < told.resume_step < 560 <= told.step_at_fault < 760
    assert f"{job.members()[1]} differs from the others" in told.summary
    undamaged(job, 760)


@pytest.mark.variant
def test_devices_break_for_good_a_spares_too(cluster: Make) -> None:
    """A member's device breaks, and the first spare's was broken from the start: the one is shut out when ranks fail there a second time,
    the other at once."""
    job = cluster("2", "--spares", "2", "--durable-every", "50", hosts=4, etcds=1, script=train(100, 0.05))
    for name in job.hosts:
        job.extra[name] = {"BROKEN": str(job.place / f"{name}.broken")}
    (job.place / "n3.broken").touch()
    job.start()
    job.until_step(20)
    (job.place / "n2.broken").touch()
    job.until(lambda: job.members() == ["n1", "n4"], 120, "the second spare has the place")
    assert set(job.finish(*job.hosts)) == {0}
    faults = [(each.cause, each.nodes, each.rung, each.started) for each in job.incidents() if each.rung]
    assert faults == [
        ("script_raised", ("n2",), 2, True),
        ("script_raised", ("n2",), 3, False),
        ("script_raised", ("n3",), 3, False),
    ]
    assert [line["node"] for line in job.told("quarantine")] == ["n2", "n3"]
    undamaged(job, 100)
