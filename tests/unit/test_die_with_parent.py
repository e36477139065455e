"""Processes that do not outlive another one, whoever their parent is."""

import signal
import subprocess
import sys

import pytest

ENDS_WITH = """
import sys, time
from mt_resilient.resilience.ipc.die_with_parent import die_with
die_with(int(sys.argv[1]))
print(flush=True)
time.sleep(60)
"""
CROWDED = """
from mt_resilient.tests.open_files import numbers_beyond_select
crowded = numbers_beyond_select()
crowded.__enter__()
"""


@pytest.mark.parametrize("crowded", [False, True])
def test_a_process_ends_with_one_that_is_not_its_parent(crowded: bool) -> None:
    other = subprocess.Popen(["sleep", "60"])
    command = [sys.executable, "-c", (CROWDED if crowded else "") + ENDS_WITH, str(other.pid)]
    tied = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert tied.stdout
    tied.stdout.readline()
    assert tied.poll() is None
    other.kill()
    other.wait()
    tied.stdout.close()
    assert tied.wait(60) == -signal.SIGKILL


def test_nor_does_it_begin_without_it() -> None:
    other = subprocess.Popen(["true"])
    other.wait()
    tied = subprocess.run([sys.executable, "-c", ENDS_WITH, str(other.pid)], capture_output=True)
    assert tied.returncode == 128 + signal.SIGKILL
