"""Steps that go wrong for real, by data and by flipped bits: what is learned of each, and the bits that are promised."""

from pathlib import Path

import pytest

from ..harness import GATED, Job, digest_of, undisturbed

SPIKING = Path(__file__).with_name("spiking.py")
STEPS = "80"
QUICK = (
    *("--set", "spikes.baseline_steps=16"),
    *("--set", "spikes.patience_steps=4"),
    *("--set", "ladder.distance_steps=10"),
    *("--set", "ladder.skip_steps=16"),
    *("--set", "ladder.same_fault_steps=30"),
    *("--durable-every", "8"),
)


def run(place: Path, *options: str, **extra: str) -> Job:
    place.mkdir(exist_ok=True)
    return Job(place, ["--nproc-per-node", "2", str(SPIKING), "--steps", STEPS], *QUICK, *options, **extra)


@pytest.mark.parametrize(
    ("hurt", "cause", "whose"),
    [
        pytest.param("gradient@40", "non_finite", (1,), marks=pytest.mark.variant),
        ("parameter@40", "loss_divergence", ()),
    ],
)
def test_what_happened_once_is_gone_at_the_replay_and_no_hardware_is_blamed(
    hurt: str, cause: str, whose: tuple[int, ...], tmp_path: Path
) -> None:
    """And it is told of which rank it was, where it was not everybody's."""
    expected, _ = undisturbed(SPIKING, "--steps", STEPS)
    job = run(tmp_path, HURT=hurt, MARKER=str(tmp_path / "hurt"))
    assert job.finish() == 0, job.said()[-3000:]
    assert (tmp_path / "hurt-1").exists()
    told = [(i.cause, i.rung, i.origin, i.ranks) for i in job.faults()]
    assert told == [(cause, 1, "transient", whose)], job.said()
    whose_hardware = " of rank 1" if whose else ""
    assert f"its origin is unknown (a transient fault of the hardware{whose_hardware} is possible)" in job.said()
    assert digest_of(job.printed()) == expected


@pytest.mark.variant
def test_a_flipped_bit_that_shows_some_steps_later_is_gone_at_the_replay_from_the_oldest_state(tmp_path: Path) -> None:
    """What memory holds by then has it; only what is on disk has not, and that is not as old as `ladder.distance_steps` wants it."""
    expected, _ = undisturbed(SPIKING, "--steps", STEPS)
    job = run(tmp_path, HURT="moment@12", MARKER=str(tmp_path / "hurt"))
    assert job.finish() == 0, job.said()[-3000:]
    told = [(i.cause, i.rung, i.remedy, i.origin) for i in job.faults()]
    assert told == [("non_finite", 1, "replay", "again"), ("non_finite", 1, "replay earlier", "state")], job.said()
    assert digest_of(job.printed()) == expected


@pytest.mark.variant
def test_a_nan_that_does_no_harm_is_replayed_once_and_then_left_alone(tmp_path: Path) -> None:
    bare = {"NO_LABELS": "40:41"}
    expected, _ = undisturbed(SPIKING, "--steps", STEPS, **bare)
    job = run(tmp_path, **bare)
    assert job.finish() == 0, job.said()[-3000:]
    told = [(i.cause, i.rung, i.remedy, i.origin) for i in job.faults()]
    assert told == [("non_finite", 1, "replay", "again"), ("non_finite", 0, "", "")], job.said()
    assert "the NaN does no harm, so training continues" in job.said()
    assert digest_of(job.printed()) == expected


def test_bad_data_is_left_out(tmp_path: Path) -> None:
    job = run(tmp_path / "hit", BAD_DATA="40:44", BAD_FOR="1")
    assert job.finish() == 0, job.said()[-3000:]
    told = [(i.cause, i.rung, i.remedy, i.origin, i.ranks) for i in job.faults()]
    assert told == [
        ("loss_divergence", 1, "replay", "again", (1,)),
        ("loss_divergence", 1, "replay earlier", "again", (1,)),
        ("loss_divergence", 1, "skip", "data", (1,)),
    ], job.said()
    assert "not without it: the data of rank 1" in job.said()
    window = job.faults()[-1].window
    assert window is not None
    assert window.start <= 40
    assert window.stop >= 44
    clean = run(tmp_path / "clean", "--skip-data", str(window), BAD_DATA="40:44", BAD_FOR="1")
    assert clean.finish() == 0, clean.said()[-3000:]
    assert not clean.faults()
    assert digest_of(job.printed()) == digest_of(clean.printed())


@pytest.mark.variant
def test_killed_behind_data_that_is_left_out(tmp_path: Path) -> None:
    """Restarted from memory, and then, with the agent, from disk: the same data stays left out."""
    window = ["--skip-data", "10:14", "--skip-data", "30:33"]
    clean = run(tmp_path / "clean", *window)
    assert clean.finish() == 0, clean.said()[-3000:]
    place = tmp_path / "hit"
    place.mkdir()
    command = ["--nproc-per-node", "2", str(GATED), str(SPIKING), "--steps", STEPS]
    job = Job(place, command, *QUICK, *window)
    job.until_step(20)
    job.kill_rank(1)
    job.until(lambda now: now.generation == 2 and now.min_step >= 26)
    job.kill_everything()
    job.start()
    assert job.finish() == 0, job.said()[-3000:]
    assert digest_of(job.printed()) == digest_of(clean.printed())


@pytest.mark.variant
def test_data_that_a_script_cannot_leave_out_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "fixed.py"
    script.write_text(SPIKING.read_text().replace("session.data_step", "step"))
    job = Job(tmp_path, ["--nproc-per-node", "2", str(script), "--steps", "5"], "--skip-data", "2:3")
    assert job.finish() == 5
    assert "it is not known which data a step of this script uses: get the batches from session.batches" in job.said()
