"""Before a job has begun and after it is over: nodes that wait for others, or are started once more; and an etcd that begins anew."""

import os
import shutil
import signal
from collections.abc import Callable

import pytest

from ..harness import PLAIN, cli, undisturbed
from .hosts import Cluster, train

pytestmark = pytest.mark.timing


@pytest.mark.variant
def test_a_node_that_waits_for_others_can_leave_and_one_of_a_job_that_is_over_has_nothing_to_do(
    cluster: Callable[..., Cluster],
) -> None:
    """One word is enough for the first, and nothing of it is left for whoever comes next; the other may have lost its run directory."""
    job = cluster("2", hosts=2, script=train(20, 0.05))
    job.net.kill("e2")  # one of three is no reason not to start
    for number in (signal.SIGINT, signal.SIGTERM):
        job.start("n1")
        job.until(lambda: job.there() == ["n1"] and "this node, n1" in job.said("n1"), 30, "it waits")
        os.kill(job.agent("n1"), number)
        assert job.finish("n1", deadline_s=30) == [128 + number]
    job.start("n1")
    job.until(lambda: "waiting for nodes: n1 is here" in job.said("n1"), 30, "it says so")
    told = cli("stop", "--run-dir", str(job.place / "runs" / "n1"))
    assert (told.returncode, job.finish("n1", deadline_s=30)) == (0, [130]), told
    job.start()
    assert job.finish("n1", "n2") == [0, 0]
    shutil.rmtree(job.place / "runs" / "n2")
    job.start("n1", "n2")
    assert job.finish("n1", "n2", deadline_s=30) == [0, 0]
    assert (
        job.said("n1").count("there is nothing to do here") == job.said("n2").count("there is nothing to do here") == 1
    )
    assert job.steps() == 20


@pytest.mark.variant
def test_an_etcd_that_has_lost_its_data_is_told_again(cluster: Callable[..., Cluster]) -> None:
    """As in a pod without a volume: those that train tell it what the job is, and a fault is answered as ever."""
    job = cluster("2", "--spares", "1", "--durable-every", "10", hosts=3, etcds=1, script=train(200, 0.05))
    job.start()
    job.until_step(20)
    job.net.kill("e1")
    job.etcd.forget(["e1"])
    job.etcd.start("e1")
    job.until(lambda: job.number() == 1 and len(job.there()) == 3, 30, "it knows the job again")
    job.net.kill("n2")
    job.until(lambda: job.members() == ["n1", "n3"], 30, "the spare takes the place")
    assert set(job.finish("n1", "n3")) == {0}
    assert job.overlaps() == []
    assert job.digest() == undisturbed(PLAIN, "--steps", "200", ranks=1)[0]
