"""Several hosts, and what may befall them: whatever does, the weights are those of a run that nothing befell."""

from collections.abc import Callable
from functools import cache

from ..harness import MINIMAL, undisturbed
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
