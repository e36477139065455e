"""A host that has lost its way to etcd: all go on as they were where that is all, and where others would do without it, it does not."""

import os
import signal
import time
from collections.abc import Callable

import pytest

from mt_resilient.chaos.live.network import sh

from ..harness import PLAIN, cli, undisturbed
from .hosts import Cluster, train

pytestmark = pytest.mark.timing


@pytest.mark.variant
def test_a_node_that_loses_etcd_alone_trains_on(cluster: Callable[..., Cluster]) -> None:
    job = cluster("2", "--spares", "1", "--durable-every", "10", hosts=3, etcds=1, script=train(200, 0.15))
    job.start()
    job.until_step(25)
    etcd = job.endpoints[0].partition(":")[0]
    sh(*job.net.inside("n2"), "ip", "route", "add", "blackhole", f"{etcd}/32")
    job.until(lambda: "the agent of n2 does not reach etcd" in job.said(), 15, "it is told")
    time.sleep(8)
    job.until(lambda: job.members() == ["n1", "n2"], 5, "nobody is replaced")
    sh(*job.net.inside("n2"), "ip", "route", "del", "blackhole", f"{etcd}/32")
    assert set(job.finish("n1", "n2", "n3")) == {0}
    assert job.digest() == undisturbed(PLAIN, "--steps", "200", ranks=1)[0]
    assert [(each.cause, each.rung) for each in job.incidents()] == [("cut_off", 0)]
    spare = cli("explain", "--run-dir", str(job.place / "runs" / "n3"))
    assert "incident 1" in spare.stdout, spare  # it has never led, and etcd has the story
    assert "the agent of n2 does not reach etcd" in spare.stdout


@pytest.mark.variant
def test_where_a_spare_takes_over_no_step_is_made_without_a_lease(cluster: Callable[..., Cluster]) -> None:
    job = cluster("1", "--spares", "1", "--durable-every", "10", hosts=2, etcds=1, script=train(500, 0.05))
    job.start()
    job.until_step(25)

    def held_up(name: str) -> Callable[[], None]:
        agent = job.agent(name)
        os.kill(agent, signal.SIGSTOP)
        return lambda: os.kill(agent, signal.SIGCONT)

    def cut_off(name: str) -> Callable[[], None]:
        job.net.apart(name)
        return lambda: job.net.apart()

    for strike in (cut_off, held_up):
        (first,) = job.members()
        mend = strike(first)
        job.until(lambda: job.members() not in ([], [first]), 20, "the spare takes over")  # noqa: B023
        job.goes_on(10)
        mend()
        job.until(lambda: len(job.there()) == 2, 20, f"{first} is back")
    assert set(job.finish("n1", "n2")) == {0}
    assert job.overlaps() == []
    assert job.digest() == undisturbed(PLAIN, "--steps", "500", ranks=1)[0]
