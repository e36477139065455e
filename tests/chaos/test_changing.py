"""A state that is more than parameters and moments, and that changes its form on the way: NaN, a killed rank, everything killed."""

from __future__ import annotations

from pathlib import Path

from ..harness import GATED, Job, digest_of, step_lines, undisturbed

CHANGING = Path(__file__).parent / "changing.py"


def test_it_comes_back_whole(tmp_path: Path) -> None:
    words = ["--steps", "40", "--step-delay", "0.02"]
    expected = undisturbed(CHANGING, *words)
    words += ["--poison", "12", "--marker", str(tmp_path / "poisoned")]
    command = ["--nproc-per-node", "2", str(GATED), str(CHANGING), *words]
    job = Job(tmp_path, command, "--durable-every", "5", GATE_AFTER="28")
    job.until_step(18)
    job.kill_rank(1)
    job.until(lambda now: now.generation == 2 and now.min_step >= 25 and all(now.pids))
    job.until_said("step 25 is on disk")
    job.kill_everything()
    job.start()
    assert job.finish(120) == 0, job.said()
    assert (digest_of(job.printed()), step_lines(job.printed())) == expected
    assert [incident.cause for incident in job.incidents()] == ["non_finite", "rank_killed", "agent_restarted"]
