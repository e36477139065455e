"""What processes that were killed leave behind."""

import os
import subprocess
import sys
from pathlib import Path

import psutil

from mt_resilient.agent.ranks.orphans import Orphans, forget_openmp


def test_what_openmp_has_registered_of_killed_processes_is_removed_and_no_other(tmp_path: Path) -> None:
    names = [f"__KMP_REGISTERED_LIB_{pid}_{os.getuid()}" for pid in (11, 12)]
    for name in names:
        (tmp_path / name).touch()
    forget_openmp([11, 13], str(tmp_path))
    assert os.listdir(tmp_path) == names[1:]


def test_the_agent_renews_its_lease_while_processes_take_long_to_vanish() -> None:
    tidying = subprocess.Popen([sys.executable, "-c", "import time; '.resource_tracker'; time.sleep(60)"])
    others = {child.pid for child in psutil.Process().children()} - {tidying.pid}
    calls, orphans = list[None](), Orphans()

    def meanwhile() -> None:
        calls.append(None)
        if len(calls) == 20:
            tidying.kill()

    orphans.meanwhile = meanwhile
    orphans.end(lambda: others, tidy_s=60.0)
    assert len(calls) >= 20
    tidying.wait()
