"""Scripts as people write them, killed and poisoned, end with the bits of an undisturbed run. All faults, and cold: scripts/conformance."""

from __future__ import annotations

from pathlib import Path

import pytest

from .ordeals import EQUAL, SCRIPTS, STEPS, Fault, Script, endure, expected


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_rank_is_killed_then_a_step_gives_nan(tmp_path: Path, script: Script) -> None:
    if script.lacks:
        pytest.skip(f"{script.lacks} is not installed")
    watched = script.session and script.nan == EQUAL
    faults = [Fault.KILL, Fault.NAN] if watched else [Fault.KILL]
    job, came = endure(script, faults, tmp_path, expected(script, tmp_path))
    assert came == EQUAL, job.said()
    assert [incident.cause for incident in job.incidents()] == ["rank_killed", "non_finite"][: len(faults)]
    assert job.incidents()[0].launch == "warm"
    if script.name == "curves":
        assert curve(tmp_path / "kept" / "curves") == curve(tmp_path / "undisturbed" / "curves")


def curve(folder: Path) -> list[tuple[int, float]]:
    """What TensorBoard shows: step and loss of each point."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    points = [(event.step, event.value) for event in EventAccumulator(str(folder)).Reload().Scalars("loss")]
    assert [step for step, _ in points] == list(range(STEPS))
    return points
