"""A bit flips in one data-parallel replica, for real: found, blamed on that rank, and the run ends with the bits of the undisturbed one."""

from __future__ import annotations

from pathlib import Path

import pytest

from mt_resilient.resilience.errors import SilentCorruption

from ..harness import FLIPPED, MINIMAL, Job, digest_of, step_lines, undisturbed

STEPS, FLIP = 120, 57


def flipped(place: Path, ranks: int, what: str, *options: str, **extra: str) -> Job:
    """A bit of rank 1 flips after step FLIP; steps take long enough for each to be compared, or not: the onset is found all the same."""
    command = [
        "--nproc-per-node",
        str(ranks),
        str(FLIPPED),
        str(MINIMAL),
        "--steps",
        str(STEPS),
        "--step-delay",
        "0.05",
    ]
    extra = {"FLIP": f"{FLIP}:1:{what}", "FLIPPED": str(place / "flipped"), "GATE_AFTER": str(STEPS - 5), **extra}
    return Job(place, command, "--durable-every", "10", *options, **extra)


@pytest.mark.parametrize("what", ["parameter", "exp_avg"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_flipped_bit_is_found_and_blamed(ranks: int, what: str, tmp_path: Path) -> None:
    digest, lines = undisturbed(MINIMAL, "--steps", str(STEPS), ranks=ranks)
    job = flipped(tmp_path, ranks, what)
    job.until_said("recovered (rung 2")
    assert job.finish() == 0, job.said()
    assert (digest_of(job.printed()), step_lines(job.printed())) == (digest, lines)
    (incident,) = job.incidents()
    assert (incident.cause, incident.rung) == ("fingerprint_mismatch", 2)
    assert FLIP <= incident.onset < STEPS
    assert incident.resume_step is not None
    assert incident.resume_step < FLIP
    tensor = "model/module.0.weight" if what == "parameter" else "optimizer/0/state/0.0/exp_avg"
    assert tensor in incident.summary
    if ranks == 3:
        assert "rank 1 differs from the others" in incident.summary
    else:
        assert "cannot be said" in incident.summary


def test_a_part_that_errs_again_and_again_ends_the_job(tmp_path: Path) -> None:
    job = flipped(tmp_path, 2, "parameter", FLIP_AGAIN="1")
    assert job.agent.wait(120) == SilentCorruption.exit_code, job.said()
    assert [i.rung for i in job.incidents()] == [2, 2, 6]
    assert "a core that computes wrongly" in job.said()
