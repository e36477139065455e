"""Which torchrun reports on the pages of its ranks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

WRAP = """
from types import SimpleNamespace
from mt_resilient.training.attach.launcher_report import wrap
torchrun = SimpleNamespace(SubprocessContext=SimpleNamespace(_close=None), _terminate_process_handler=None)
wrap(torchrun)
print(torchrun.SubprocessContext._close is not None)
"""


@pytest.mark.parametrize(
    ("parent", "reports"),
    [
        ({"MT_RESILIENT_HANDOFF": "{}", "TORCHELASTIC_RUN_ID": "none"}, False),
        ({"TORCHELASTIC_RUN_ID": "of a torchrun around the agent"}, True),
        ({"MT_RESILIENT_HANDOFF": "another agent's", "TORCHELASTIC_RUN_ID": "none"}, True),
        ({"MT_RESILIENT_HANDOFF": "{}"}, True),  # a wrapper of the launcher
    ],
    ids=["a rank", "an outer torchrun", "a rank of an outer job", "a wrapper"],
)
def test_a_torchrun_that_a_rank_has_started_reports_nothing(parent: dict[str, str], reports: bool) -> None:
    """Also if the rank has removed torchrun's variables from its environment, as one does for an evaluation."""
    clean = "env -u TORCHELASTIC_RUN_ID MT_RESILIENT_HANDOFF={}"
    command = [
        "sh",
        "-c",
        f'{clean} timeout 100 "$@"; true',
        "sh",
        sys.executable,
        "-c",
        WRAP,
    ]  # `true`: sh stays the parent
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(Path(__file__).parents[3]), **parent}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == (f"{reports}\n", "")
