"""What torchrun starts for a rank need not be the process that trains: wrappers, their helpers, launchers of launchers."""

from __future__ import annotations

import platform
import shlex
import sys
from pathlib import Path

import psutil
import pytest

from ..harness import GATED, MINIMAL, Job, digest_of, step_lines, undisturbed

STEPS = 60
TRAINER = [sys.executable, str(GATED), str(MINIMAL), "--steps", str(STEPS), "--step-delay", "0.02"]
HELPERS = """
{python} -c "print('a check')"
{python} -c "raise SystemExit(3)" || echo "a helper has failed"
"""
LAUNCHER = """
import os, subprocess, sys
if len(sys.argv) > 1 and sys.argv[1] == "again":
    os.execv(sys.argv[2], sys.argv[2:])
raise SystemExit(subprocess.run([sys.executable, __file__, "again", *sys.argv[1:]]).returncode)
"""
WRAPPER = """
if [ $LOCAL_RANK = 1 ]; then exec {python} {launcher} {trainer}; fi
{helpers}
{trainer}
"""
WORKER = """
import multiprocessing

def work():
    from mt_resilient.training.attach.attach import attach
    print("worker", attach(trains=False), flush=True)

if __name__ == "__main__":
    helper = multiprocessing.get_context("spawn").Process(target=work)
    helper.start()
    helper.join()
"""


def test_the_process_that_trains_is_the_rank(tmp_path: Path) -> None:
    """Rank 0: a shell script with helpers before the trainer. Rank 1: a Python that starts a Python that becomes the trainer."""
    launcher, worker, wrapper = (tmp_path / name for name in ("launcher.py", "worker.py", "wrapper.sh"))
    launcher.write_text(LAUNCHER)
    worker.write_text(WORKER)
    helpers = HELPERS.format(python=sys.executable) + shlex.join([sys.executable, str(worker)])
    wrapper.write_text(
        WRAPPER.format(python=sys.executable, launcher=launcher, helpers=helpers, trainer=shlex.join(TRAINER))
    )
    job = Job(tmp_path, ["--nproc-per-node", "2", "--no-python", "bash", str(wrapper)])
    pids = job.until(lambda now: now.min_step >= 25 and bool(now.pids) and all(now.pids)).pids
    assert [psutil.Process(pid).cmdline() for pid in pids] == [TRAINER] * 2
    job.kill_rank(1)
    assert job.finish() == 0, job.said()
    assert (digest_of(job.printed()), step_lines(job.printed())) == undisturbed(MINIMAL, "--steps", str(STEPS))
    assert [(i.cause, i.launch) for i in job.faults()] == [
        ("rank_killed", "cold: ranks are started by bash, not by torchrun's Python")
    ]
    assert all(i.resume_step and i.resume_step >= 20 for i in job.faults())
    assert "ranks are started by bash" in job.said()
    assert "a helper has failed" in job.printed()
    assert "worker None" in job.printed()
    assert "worker Attachment" not in job.printed()


WAITS = """
import os, pathlib, sys, time
from mt_resilient.training.attach.attach import attach
attach()
while not pathlib.Path(sys.argv[1], "over").exists():
    time.sleep(0.05)
"""


@pytest.mark.variant
def test_who_is_killed_is_named_and_not_who_ends_with_it(tmp_path: Path) -> None:
    """The launcher; and the shell that has started a rank. Ranks that torchrun ends because of it are not blamed."""
    script, wrapper = tmp_path / "waits.py", tmp_path / "wrapper.sh"
    script.write_text(WAITS)
    wrapper.write_text(f"{sys.executable} {script} {tmp_path}\nexit $?\n")
    job = Job(tmp_path, ["--nproc-per-node", "2", "--no-python", "bash", str(wrapper)])

    def trainers(generation: int) -> list[psutil.Process]:
        now = job.until(lambda now: now.generation == generation and bool(now.pids) and all(now.pids))
        return [psutil.Process(pid) for pid in now.pids]

    launcher = trainers(1)[0].parent().parent()
    launcher.terminate()
    trainers(2)[1].parent().kill()
    trainers(3)
    (tmp_path / "over").touch()
    assert job.finish() == 0, job.said()
    told = [incident.summary.replace(f" on {platform.node()}", "") for incident in job.faults()]
    assert told == ["the launcher (torchrun) was killed by signal 15", "the wrapper of rank 1 was killed by signal 9"]
