"""What the warm process has printed, and a rank prints again."""

import subprocess
import sys

PRINTS = (
    "from mt_resilient.training.warm.captured_output import print_again; print_again({2: b'a warning', 1: b'printed'})"
)


def test_a_rank_whose_stderr_cannot_be_written_continues() -> None:
    """`warnings` and `logging`, whose words these mostly are, are silent there."""
    with open("/dev/full", "wb") as full:
        done = subprocess.run([sys.executable, "-c", PRINTS], stdout=subprocess.PIPE, stderr=full, timeout=60)
    assert (done.returncode, done.stdout) == (0, b"printed")
