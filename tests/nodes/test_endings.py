"""A node dies when the ranks are through, and takes its part of their last state along: the job has not ended."""

from collections.abc import Callable

import pytest

from mt_resilient.resilience.model.state_machine import Phase

from ..harness import PLAIN, undisturbed
from .hosts import Cluster, train

pytestmark = pytest.mark.timing

SLOWLY = ("--set", "snapshots.max_write_mb_per_s=0.005")
"""A part of a snapshot takes seconds."""


def ending(job: Cluster) -> bool:
    world = job.world()
    return bool(world and world.record and world.record.phase is Phase.ENDING)


@pytest.mark.variant
def test_a_node_dies_before_the_last_snapshot_is_on_disk(cluster: Callable[..., Cluster]) -> None:
    """The first one, which was to commit it: the spare takes its place, and the steps since the last snapshot are computed again. What the
    other's drain process was at is left, and what it writes afterwards is there."""
    job = cluster("2", "--spares", "1", "--durable-every", "30", *SLOWLY, hosts=3, etcds=1, script=train(50, 0.1))
    job.start()
    job.until_step(35)
    # However slow this machine is, what n1 has to write from here on is not there before it dies.
    job.drain_process("n1").suspend()
    job.until(lambda: ending(job), 120, "the ranks are through")
    job.net.kill("n1")
    assert set(job.finish("n2", "n3")) == {0}
    assert job.digest() == undisturbed(PLAIN, "--steps", "50", ranks=1)[0]
    (incident,) = [each for each in job.incidents() if each.rung]
    assert (incident.cause, incident.rung) == ("agent_lost", 3)
    assert "its final state, of step 50, was not on disk" in " ".join(incident.evidence)


@pytest.mark.variant
def test_a_node_whose_last_part_does_not_come_is_waited_for_and_that_is_told(cluster: Callable[..., Cluster]) -> None:
    job = cluster("2", "--durable-every", "10", hosts=2, etcds=1, script=train(150, 0.05))
    job.start()
    job.until_step(15)
    drain = job.drain_process("n2")
    drain.suspend()
    for name in job.hosts:
        job.until(lambda name=name: "is not on disk yet, here or on another node" in job.said(name), 180, "it is told")
    assert ending(job)
    drain.resume()
    assert set(job.finish("n1", "n2")) == {0}
