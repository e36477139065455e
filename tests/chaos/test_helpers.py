"""etcd, the drain process and the warm process die: training goes on, and recovery works afterwards."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

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
    first, second = job.faults()
    assert first.launch == "cold: the warm process was killed by signal 9"
    assert second.launch == "warm"


LEAVES = """
import multiprocessing, subprocess, sys, time
import torch
from mt_resilient import Session

def forever():
    time.sleep(777)

if __name__ == "__main__":
    subprocess.Popen(["sleep", "777.7"], start_new_session=True)
    multiprocessing.get_context(sys.argv[1]).Process(target=forever, daemon=True).start()
    for step in Session(model=torch.nn.Linear(2, 2)).steps(9999):
        time.sleep(0.02)
"""


@pytest.mark.variant
@pytest.mark.parametrize(
    "how",
    ["spawn", pytest.param("forkserver", marks=pytest.mark.variant), pytest.param("fork", marks=pytest.mark.variant)],
)
def test_what_ranks_have_started_ends_with_a_killed_agent(how: str, tmp_path: Path) -> None:
    """Ranks die with it by the kernel's doing; a program in a session of its own, or a worker that waits for its parent, does not."""
    script = tmp_path / "leaves.py"
    script.write_text(LEAVES)
    job = Job(tmp_path, ["--nproc-per-node", "2", str(script), how])
    job.until_step(3)
    ranks = [psutil.Process(pid) for pid in job.look().pids]  # type: ignore[union-attr]
    started = [child for rank in ranks for child in rank.children(recursive=True)]
    assert len(started) >= 4, started
    job.agent.kill()
    job.agent.wait()
    _, alive = psutil.wait_procs([*ranks, *started], timeout=15)
    assert not alive
