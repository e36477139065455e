"""What processes that were killed leave behind."""

import os
from pathlib import Path

from mt_resilient.agent.ranks.orphans import forget_openmp


def test_what_openmp_has_registered_of_killed_processes_is_removed_and_no_other(tmp_path: Path) -> None:
    names = [f"__KMP_REGISTERED_LIB_{pid}_{os.getuid()}" for pid in (11, 12)]
    for name in names:
        (tmp_path / name).touch()
    forget_openmp([11, 13], str(tmp_path))
    assert os.listdir(tmp_path) == names[1:]
