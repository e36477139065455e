"""Nodes of one rank: bits flip, and other faults strike before the flip is detected. The job ends with the bits of an undisturbed run."""

import random

from mt_resilient.resilience.detect.node_divergence import TRUSTED
from mt_resilient.resilience.model.cause import Cause
from mt_resilient.resilience.plan.escalation import RecoveryPolicy

from ..scenarios.cluster import Job

SEEDS, STEPS = 150, 160
PATIENT = RecoveryPolicy(max_without_progress=99, same_failure_at_start=99, failed_starts=99, max_mismatches=99)


def known(job: Job) -> bool:
    """Whether ranks train, and all members have told so many snapshots alike that they are known for replicas."""
    if not (job.node and job.node.ranks and job.ranks.alive and 0 <= job.ranks.step < STEPS - 30):
        return False
    told = [{*node.replicas._held} for name in job.world().members if (node := job.nodes.get(name))]
    together = set.intersection(*told) if len(told) == len(job.world().members) > 0 else set()
    return len(together) > TRUSTED


def wait(job: Job, seconds: int) -> None:
    for _ in range(seconds):
        job.tick()


def play(seed: int) -> tuple[Job, int]:
    """The job, over; and how many bits have flipped."""
    dice, flips = random.Random(seed), 0
    nodes = dice.choice((2, 2, 3, 4))
    job = Job(nodes=str(nodes), spares=dice.choice((0, 1, 1, 2)), ranks=1, total=STEPS, policy=PATIENT)
    job.until_step(30)
    for _ in range(dice.randrange(1, 5)):
        wait(job, dice.randrange(1, 12))
        if dice.random() < 0.6 and known(job):
            rank = dice.randrange(nodes)
            job.say(f"a bit of rank {rank}'s copy flips after step {job.ranks.step}")
            job.ranks.odd |= {rank}
            flips += 1
            wait(job, dice.randrange(4))
        there = sorted(name for name, node in job.nodes.items() if node)
        ranks = [rank for rank, *_ in job.ranks.each()] if job.node and job.node.ranks and job.ranks.alive else []
        match dice.choice(("nothing", "rank", "agent", "node", "etcd")):
            case "rank" if ranks:
                job.kill_rank(dice.choice(ranks))
            case "agent" | "node" as what if there:
                name = dice.choice(there)
                (job.kill_agent if what == "agent" else job.kill_node)(name)
                wait(job, dice.randrange(14))
                job.start_agent(name)
            case "etcd":
                job.stop_store()
                wait(job, dice.randrange(1, 8))
                job.start_store()
                wait(job, 1)
                for name in {*job.names} - {name for name, node in job.nodes.items() if node}:
                    job.start_agent(name)  # who came meanwhile has left
    job.to_the_end()
    return job, flips


def test_a_flipped_bit_does_not_stay_whatever_else_happens() -> None:
    found = flipped = 0
    for seed in range(SEEDS):
        job, flips = play(seed)
        assert (job.exit_code, job.last_state) == (0, tuple(range(1, STEPS + 1))), f"seed {seed}\n{job.transcript()}"
        flipped += flips
        told = [i for i in job.incidents.values() if i.cause == Cause.FINGERPRINT_MISMATCH]
        assert flips or not told, f"seed {seed}: replicas were suspected that were right\n{job.transcript()}"
        found += len(told)
    assert found > flipped / 2 > 20, "or most flips have gone with the node, and this shows little"
