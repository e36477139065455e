"""Whatever happens, and in whatever order: the job ends by itself, with every sample used once and in order."""

from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from mt_resilient.resilience.inprocess.rewind_ladder import LadderPolicy
from mt_resilient.resilience.inprocess.tally import RankPolicy
from mt_resilient.resilience.model.request import Wish
from mt_resilient.resilience.model.types import RankPhase, Step
from mt_resilient.resilience.plan.escalation import RecoveryPolicy

from .cluster import Job

PATIENT = RecoveryPolicy(max_without_progress=99, same_failure_at_start=99, max_mismatches=99)
REPLAYS = RankPolicy(ladder=LadderPolicy(max_replays=99))


def kill_rank(job: Job) -> None:
    if job.node and job.node.ranks and job.ranks.group.ranks and job.ranks.alive:
        job.kill_rank(1)


def kill_agent(job: Job) -> None:
    if job.node and not job.store.down:
        job.kill_agent()


def start_agent(job: Job) -> None:
    if job.node is None:
        start_store(job)
        job.start_agent()


def nan(job: Job) -> None:
    if job.node and job.node.ranks:
        job.faults.nan_at[job.ranks.step + 1] = 1


def hang(job: Job) -> None:
    """Once the script is known to tell its steps: what one that never does is about, nobody can know."""
    if job.node and job.node.ranks and job.ranks.alive and job.ranks.life >= RankPhase.RESTORING:
        job.ranks.hang("somewhere")


def stop_store(job: Job) -> None:
    if job.node:
        job.stop_store()


def start_store(job: Job) -> None:
    if job.store.down:
        job.start_store()


def stall(job: Job) -> None:
    job.faults.agent_stalls = not job.faults.agent_stalls


def flip(job: Job) -> None:
    """Once the replicas are known for such."""
    if job.node and job.node.ranks and job.node.replicas.copies():
        job.faults.flip_at[job.ranks.step + 1] = 1


def send_back(job: Job) -> None:
    """To a step that is on disk, or was."""
    if job.node:
        job.order(Wish.REWIND, step=Step(max(job.disk, default=4)))


def pause(job: Job) -> None:
    if job.node:
        job.order(Wish.PAUSE)


def resume(job: Job) -> None:
    if job.node:
        job.order(Wish.RESUME)


FAULTS = (kill_rank, kill_agent, start_agent, nan, stop_store, start_store, stall, hang, flip, send_back, pause, resume)
Moment = tuple[int, int]
"""Seconds to wait, and which of FAULTS comes then."""


@settings(max_examples=200, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, len(FAULTS) - 1)), max_size=8), st.sampled_from([1, 3, 4]))
@example([(10, 0), (0, 1), (1, 2)], 4)
@example([(12, 1), (2, 2), (8, 0), (0, 0)], 4)
def test_nothing_is_lost_or_used_twice(moments: list[Moment], durable_every: int) -> None:
    job = Job(durable_every=durable_every, policy=PATIENT, judged_by=REPLAYS)
    for wait_s, which in moments:
        for _ in range(wait_s):
            if job.exit_code is None:
                job.tick()
        if job.exit_code is None:
            FAULTS[which](job)
    if job.exit_code is None:
        job.faults.agent_stalls = False
        start_store(job)
        start_agent(job)
        job.tick()
        resume(job)
    job.ends()
    assert job.last_state == job.disk[12] == tuple(range(1, 13)), job.transcript()
    assert all(state == tuple(range(1, step + 1)) for step, state in job.disk.items()), job.transcript()
    assert not [i.id for i in job.incidents.values() if i.open], job.transcript()
    lost = sum(incident.lost_steps for incident in job.incidents.values())
    again = job.computed - 12
    # A killed agent takes with it what it had not said yet.
    assert lost == again if job.lives == 1 else lost <= again, job.transcript()
