"""What processes that were killed leave behind."""

import os
import subprocess
import sys
from pathlib import Path

from mt_resilient.agent.ranks.orphans import Orphans, forget_openmp


def test_what_openmp_has_registered_of_killed_processes_is_removed_and_no_other(tmp_path: Path) -> None:
    names = [f"__KMP_REGISTERED_LIB_{pid}_{os.getuid()}" for pid in (11, 12)]
    for name in names:
        (tmp_path / name).touch()
    forget_openmp([11, 13], str(tmp_path))
    assert os.listdir(tmp_path) == names[1:]


def test_the_agent_renews_its_lease_while_processes_take_long_to_vanish() -> None:
    tidying = subprocess.Popen([sys.executable, "-c", "import time; '.resource_tracker'; time.sleep(60)"])
    others, calls, orphans = set(_children()) - {tidying.pid}, list[float](), Orphans()
    orphans.meanwhile = lambda: calls.append(0.0)
    orphans.end(lambda: others, tidy_s=0.5)
    assert len(calls) > 20
    tidying.kill()
    tidying.wait()


def _children() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
