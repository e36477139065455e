"""Several hosts, and what may befall them: whatever does, the weights are those of a run that nothing befell."""

import os
import signal
import time
from collections.abc import Callable
from functools import cache

from ..harness import MINIMAL, cli, undisturbed
from .hosts import Cluster, train

Make = Callable[..., Cluster]


@cache
def clean(ranks: int, steps: int) -> str:
    return undisturbed(MINIMAL, "--steps", str(steps), ranks=ranks)[0]


def test_a_spare_takes_the_place_of_a_node_that_dies(cluster: Make) -> None:
    job = cluster("2", "--spares", "1", "--durable-every", "10", hosts=3, etcds=1, script=train(120, 0.1))
    job.start()
    job.until_step(25)
    assert job.members() == ["n1", "n2"]
    job.net.kill("n2")
    job.until(lambda: job.members() == ["n1", "n3"], 10, "n3 takes the place of n2")
    job.until_step(40)
    assert set(job.finish("n1", "n3")) == {0}
    assert job.digest() == clean(2, 120)
    (incident,) = [each for each in job.incidents() if each.rung]
    assert (incident.cause, incident.rung) == ("agent_lost", 3)


def test_a_node_that_is_cut_off_is_replaced_and_ends_its_ranks(cluster: Make) -> None:
    job = cluster("2", "--spares", "1", "--durable-every", "10", hosts=3, script=train(150, 0.1))
    job.start()
    job.until_step(25)
    job.net.link("n2", up=False)
    job.until(lambda: job.members() == ["n1", "n3"], 15, "n3 takes the place of n2")
    job.until(lambda: "its ranks are ended" in job.said(), 15, "n2 ends its ranks")
    job.until_step(45)
    job.net.link("n2", up=True)
    assert set(job.finish("n1", "n2", "n3")) == {0}
    assert job.digest() == clean(2, 150)


def test_training_goes_on_while_most_of_etcd_is_away(cluster: Make) -> None:
    job = cluster("2", "--durable-every", "20", hosts=2, script=train(400, 0.1))
    job.start()
    job.until_step(25)
    for name in ("e1", "e2"):
        job.net.kill(name)
    job.until(lambda: "etcd did not answer" in job.said(), 10, "the agents notice")
    before = steps_printed(job)
    time.sleep(30)
    assert steps_printed(job) > before + 100
    for name in ("e1", "e2"):
        job.start_etcd(name)
    assert set(job.finish("n1", "n2")) == {0}
    assert not [each for each in job.incidents() if each.rung]
    assert job.digest() == clean(2, 400)


def test_nodes_are_drained_and_come_back(cluster: Make) -> None:
    options = ("--durable-every", "50", "--set", "nodes.grow_after_s=3")
    job = cluster("1:2", *options, hosts=2, script=train(200, 0.1))
    job.start()
    job.until_step(25)
    told = cli("drain", "n2", "--run-dir", str(job.place / "runs" / "n1"))
    assert (told.returncode, "the job goes on on n1" in told.stdout) == (0, True), told
    assert job.finish("n2") == [0]
    job.until_step(50)
    job.start("n2")
    job.until(lambda: job.members() == ["n1", "n2"], 30, "the job grows")
    assert set(job.finish("n1", "n2")) == {0}
    moved = [each for each in job.incidents() if each.rung]
    assert [each.cause for each in moved] == ["moved", "moved"]
    assert [each.lost_steps for each in moved] == [0, 0]


def test_what_a_dead_node_had_in_memory_comes_back_from_another_nodes(cluster: Make) -> None:
    """Nothing but the first snapshot is on disk."""
    options = ("--spares", "1", "--durable-every", "1000", "--set", "copies.every_s=0.5")
    job = cluster("2", *options, hosts=3, etcds=1, script=train(160, 0.1))
    job.start()
    job.until_step(50)
    job.net.kill("n2")
    assert set(job.finish("n1", "n3")) == {0}
    assert job.digest() == clean(2, 160)
    (incident,) = [each for each in job.incidents() if each.rung]
    assert incident.resume_step
    assert 0 < incident.lost_steps < 25
    assert "has come back from another node's memory" in job.said()


def steps_printed(job: Cluster) -> int:
    return sum(line.startswith("step ") for line in job.printed().splitlines())


def test_an_agent_that_dies_alone_is_missed_before_its_lease_is_over(cluster: Make) -> None:
    options = ("--spares", "1", "--durable-every", "10", "--set", "agent.lease_ttl_s=60")
    job = cluster("2", *options, hosts=3, etcds=1, script=train(120, 0.1))
    job.start()
    job.until_step(25)
    os.kill(job.agent("n2"), signal.SIGKILL)
    job.until(lambda: job.members() == ["n1", "n3"], 10, "n3 takes the place of n2")
    assert set(job.finish("n1", "n3")) == {0}
    assert job.digest() == clean(2, 120)
