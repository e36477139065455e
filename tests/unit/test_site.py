"""What an interpreter runs before the script: our sitecustomize."""

import subprocess
import sys
from pathlib import Path

from mt_resilient.agent.launch.torchrun import SITE


def test_a_warm_process_that_fails_never_goes_on_with_the_script(tmp_path: Path) -> None:
    """It is no rank: it would train as a world of its own, over the job's files."""
    script = tmp_path / "train.py"
    script.write_text("print('the script runs')")
    environment = {"PYTHONPATH": str(SITE), "MT_RESILIENT_WARM": "{}"}  # a plan without a channel
    done = subprocess.run([sys.executable, "-u", script], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert "KeyError: 'channel'" in done.stderr
