"""A bit flips in one data-parallel replica, for real: found, blamed on that rank, and the run ends with the bits of the undisturbed one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mt_resilient.resilience.errors import SilentCorruption

from ..harness import FLIPPED, FSDP, MINIMAL, Job, digest_of, step_lines, undisturbed

STEPS = 120


LAYOUTS = {
    "two by DDP": (2, [str(MINIMAL), "--steps", str(STEPS), "--step-delay", "0.05"]),
    # Not by DDP: after any restart its first step reduces in other buckets than in a run without one, hence in another order.
    "three by FSDP": (
        3,
        [str(FSDP), "--steps", str(STEPS), "--replicate", "3", "--step-delay", "0.05", "--decay-every", "100"],
    ),
}


def flipped(place: Path, layout: str, what: str, step: int, *options: str, **extra: str) -> Job:
    """A bit of rank 1 flips after that step."""
    ranks, script = LAYOUTS[layout]
    command = ["--nproc-per-node", str(ranks), str(FLIPPED), *script]
    extra = {"FLIP": f"{step}:1:{what}", "FLIPPED": str(place / "flipped"), "GATE_AFTER": str(STEPS - 5), **extra}
    return Job(place, command, "--durable-every", "10", *options, **extra)


@pytest.mark.parametrize(("what", "step"), [("parameter", 57), pytest.param("exp_avg", 60, marks=pytest.mark.variant)])
@pytest.mark.parametrize("layout", ["two by DDP", pytest.param("three by FSDP", marks=pytest.mark.variant)])
def test_a_flipped_bit_is_found_and_blamed(layout: str, what: str, step: int, tmp_path: Path) -> None:
    ranks, script = LAYOUTS[layout]
    expected = undisturbed(Path(script[0]), *script[1:], ranks=ranks)
    job = flipped(tmp_path, layout, what, step)
    job.until_said("recovered (rung 1")
    assert job.finish() == 0, job.said()
    assert (digest_of(job.printed()), step_lines(job.printed())) == expected
    (incident,) = job.faults()
    assert (incident.cause, incident.rung) == ("fingerprint_mismatch", 1)
    assert step <= incident.onset <= step + 10
    assert incident.resume_step is not None
    assert incident.resume_step < step
    assert ("0.weight" if what == "parameter" else "optimizer/0/state/0.0/exp_avg") in incident.summary
    if ranks == 3:
        assert "rank 1 differs from the others" in incident.summary
    elif incident.onset == step:  # with no step in between that has carried it on, computing it again tells
        # if the agent is too busy to look at the step that is computed again, it blames nobody
        assert re.search("rank 1 was wrong|not known which of them is wrong", incident.evidence[-1])
        assert not any("rank 0 was wrong" in each for each in incident.evidence)
    assert step != 60 or incident.onset == step, "what goes to disk is always compared"


@pytest.mark.variant
def test_a_part_that_errs_again_and_again_ends_the_job(tmp_path: Path) -> None:
    job = flipped(tmp_path, "two by DDP", "parameter", 60, FLIP_AGAIN="1")
    assert job.agent.wait(120) == SilentCorruption.exit_code, job.said()
    assert [i.rung for i in job.faults()] == [1, 1, 6]
    assert "replicas diverged 3 times" in job.said()
