"""Scripts as people write them, killed and poisoned, end with the bits of an undisturbed run. All faults, and cold: scripts/conformance."""

from __future__ import annotations

from pathlib import Path

import pytest

from .ordeals import EQUAL, SCRIPTS, STEPS, Fault, Script, endure, expected

VARIANTS = (
    "accelerated",
    "compiled",
    "fabric",
    "curves",
    "trainer",
    "progress",
    "gan",
    "accumulation",
    "evaluation",
    "checkpoints",
    "plain",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "script",
    [
        pytest.param(script, id=script.name, marks=[pytest.mark.variant] if script.name in VARIANTS else [])
        for script in SCRIPTS
    ],
)
def test_a_rank_is_killed_then_a_step_gives_nan(tmp_path: Path, script: Script) -> None:
    if script.lacks:
        pytest.skip(f"{script.lacks} is not installed")
    watched = script.session and script.nan == EQUAL
    faults = [Fault.KILL, Fault.NAN] if watched else [Fault.KILL]
    job, came = endure(script, faults, tmp_path, expected(script, tmp_path))
    assert came == EQUAL, job.said()
    assert [incident.cause for incident in job.faults()] == ["rank_killed", "non_finite"][: len(faults)]
    assert job.faults()[0].launch.partition(":")[0] == ("warm" if script.session else "cold")
    if script.name == "curves":
        assert curve(tmp_path / "kept" / "curves") == curve(tmp_path / "undisturbed" / "curves")
    if script.name == "progress":
        assert f"{STEPS}/{STEPS}" in job.said()


@pytest.mark.variant
@pytest.mark.slow
def test_the_agent_is_killed_before_any_snapshot_and_the_script_s_own_checkpoint_is_gone_on_from(
    tmp_path: Path,
) -> None:
    script = next(script for script in SCRIPTS if script.name == "checkpoints")
    job, came = endure(script, [Fault.AGENT], tmp_path, expected(script, tmp_path), "--durable-every", "1000")
    assert came == EQUAL, job.said()
    assert "from the script's own start" in job.said()


@pytest.mark.variant
@pytest.mark.slow
def test_killed_in_a_second_loop_it_begins_that_loop_again(tmp_path: Path) -> None:
    """The steps of the second loop were taken for the first one's, and so were its snapshots."""
    script = Script(name="two_loops", folder=Path(__file__).parent, session=False, passes=2)
    job, came = endure(script, [Fault.KILL], tmp_path, expected(script, tmp_path))
    assert came == EQUAL, job.said()
    assert job.said().count("this script has begun a second training loop") == 2
    assert job.faults()[0].resume_step == STEPS // 2


@pytest.mark.variant
@pytest.mark.slow
def test_accelerate_steps_the_optimizer_at_the_same_batches(tmp_path: Path) -> None:
    script = Script(name="synchronizing", folder=Path(__file__).parent, needs="accelerate")
    if script.lacks:
        pytest.skip(f"{script.lacks} is not installed")
    job, came = endure(script, [Fault.KILL, Fault.NAN], tmp_path, expected(script, tmp_path))
    assert came == EQUAL, job.said()


def curve(folder: Path) -> list[tuple[int, float]]:
    """What TensorBoard shows: step and loss of each point."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    points = [(event.step, event.value) for event in EventAccumulator(str(folder)).Reload().Scalars("loss")]
    assert [step for step, _ in points] == list(range(STEPS))
    return points
