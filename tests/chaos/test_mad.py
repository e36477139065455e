"""A rank that writes where it must not is ended; the agent is not, and no bit is lost."""

from __future__ import annotations

import json
from pathlib import Path

from ..harness import MINIMAL, ROOT, Job, digest_of, step_lines, undisturbed

SCRIBBLING = ROOT / "tests" / "chaos" / "scribbling.py"
STEPS = 60


def test_a_rank_writes_at_random_into_all_that_it_has(tmp_path: Path) -> None:
    expected = undisturbed(MINIMAL, "--steps", str(STEPS))
    found = tmp_path / "descriptors"
    script = [str(SCRIBBLING), str(found), str(MINIMAL), "--steps", str(STEPS), "--step-delay", "0.05"]
    job = Job(tmp_path, ["--nproc-per-node", "2", *script], "--durable-every", "10")
    assert job.finish() == 0, job.said()
    assert (digest_of(job.printed()), step_lines(job.printed())) == expected
    assert "local rank 1 has written over its page" in job.said()
    assert "Traceback" not in job.said().partition("local rank 1 has written")[0]
    incident = job.faults()[0]
    assert (incident.cause, incident.rung) == ("rank_killed", 2)
    assert "because it had overwritten its page" in incident.summary
    ours = {int(fd): what for fd, what in json.loads(found.read_text()).items() if "mt-resilient" in what}
    assert ours
    assert all(fd >= 100 for fd in ours), ours
