"""Scripts that end a job by what `ps` shows of torchrun, as people's stop_all.sh do."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

from ..harness import BIN, GATED, MINIMAL, Job


def test_a_script_that_looks_for_the_path_of_torchrun_ends_the_job(tmp_path: Path) -> None:
    """It finds the agent, too. If it found the launcher alone, that would be a fault, and the ranks would start again."""
    torchrun = tmp_path / "bin" / "torchrun"
    torchrun.parent.mkdir()
    shutil.copy(BIN / "torchrun", torchrun)
    path = f"{torchrun.parent}:{BIN}:{os.environ['PATH']}"
    job = Job(tmp_path, [str(GATED), str(MINIMAL), "--steps", "60"], PATH=path)
    job.until(lambda now: now.min_step >= 20)
    found = subprocess.run(["pgrep", "-f", f"python[0-9.]* {torchrun} "], capture_output=True, text=True).stdout.split()
    for pid in map(int, found):
        with suppress(ProcessLookupError):  # pgrep may have found what was ending
            os.kill(pid, signal.SIGTERM)
    assert job.agent.wait(180) == 128 + signal.SIGTERM, job.said()
    assert "generation 2" not in job.said()
