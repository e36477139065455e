"""A campaign of real processes notices a bug in the real program. `scripts/planted-bugs` has all of them; these take no root."""

import subprocess
import sys
from pathlib import Path

import pytest

from ..harness import environment

SCRIPT = Path(__file__).parents[2] / "scripts" / "planted-bugs"


@pytest.mark.variant
@pytest.mark.timeout(1800)
def test_planted_bugs_are_caught_and_their_plans_pass_without_them() -> None:
    command = [sys.executable, str(SCRIPT), "one-rng-for-all", "orphan-left"]
    done = subprocess.run(command, env=environment(), text=True, capture_output=True, timeout=1700)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("caught: broken is") == 2
