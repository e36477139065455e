"""What a Session is not given does not come back. The steps that are computed again show it, and the incident says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from mt_resilient.resilience.model.signals import Repeated

from ..harness import Job

SCRIPT = Path(__file__).with_name("forgets.py")


@pytest.mark.variant
@pytest.mark.parametrize(
    "killed", [pytest.param(True, id="killed"), pytest.param(False, id="rewound in place", marks=pytest.mark.variant)]
)
def test_a_state_that_the_session_is_not_given_is_told_by_the_steps_computed_again(
    killed: bool, tmp_path: Path
) -> None:
    words = ["--mark", str(tmp_path / "mark"), "--nan-at", "-1" if killed else "25"]
    job = Job(tmp_path, ["--nproc-per-node", "2", str(SCRIPT), *words], "--snapshot-every", "20")
    job.forgets = True
    if killed:
        job.until_step(25)
        job.kill_rank(1)
    assert job.finish() == 0
    (incident,) = job.faults()
    assert incident.repeated is Repeated.OTHER
    assert "computed again, with another loss than before" in job.said()
