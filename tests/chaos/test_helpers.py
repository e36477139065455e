"""etcd, the drain process and the warm process die: training goes on, and recovery works afterwards."""

from __future__ import annotations

from pathlib import Path

from ..harness import GATED, MINIMAL, Job, digest_of, undisturbed

STEPS = 120


def test_the_helpers_die_one_after_the_other_and_then_a_rank(tmp_path: Path) -> None:
    expected, _ = undisturbed(MINIMAL, "--steps", str(STEPS))
    command = ["--nproc-per-node", "2", str(GATED), str(MINIMAL), "--steps", str(STEPS), "--step-delay", "0.02"]
    job = Job(tmp_path, command, "--durable-every", "10")
    job.until_said("the warm process is ready")
    pids = job.until_step(5).pids
    job.helper("etcd").kill()
    job.until_said("etcd answers again")
    job.helper("drain_process").kill()
    job.until_said("the drain process ended with code -9")
    job.warm_process().kill()
    job.until_said("the warm process cannot be used")
    job.until_said("the warm process is ready", times=2)
    job.warm_process().kill()  # once more in this generation, and there is none until the next
    job.until_said("the warm process cannot be used", times=2)
    assert job.until(lambda now: True).pids == pids, "no rank was touched by any of it"
    job.kill_rank(0)
    job.until_said("the warm process is ready", times=3)
    job.kill_rank(1)
    assert job.finish() == 0, job.said()
    assert digest_of(job.printed()) == expected
    assert f"step {STEPS} is on disk" in job.said()
    first, second = job.incidents()
    assert first.launch == "cold: the warm process was killed by signal 9"
    assert second.launch == "warm"
