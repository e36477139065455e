"""A host that has lost its way to etcd, and to nothing else: all go on as they were."""

import time
from collections.abc import Callable

from ..harness import PLAIN, cli, undisturbed
from .hosts import Cluster, sh, train


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
