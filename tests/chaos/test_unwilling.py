"""A thing that does not take its state back: no step is ever made from a state that is restored in part."""

from __future__ import annotations

from pathlib import Path

import pytest

from mt_resilient.checkpoint.backend import place
from mt_resilient.checkpoint.durable import catalog
from mt_resilient.resilience.errors import LayoutError

from ..harness import GATED, Job, digest_of, undisturbed

UNWILLING = Path(__file__).parent / "unwilling.py"
SAID = "the state of 'thing' cannot be restored ("


def begun(place: Path, where: str, *words: str) -> Job:
    words = ("--where", where, "--steps", "40", "--step-delay", "0.02", *words)
    job = Job(
        place, ["--nproc-per-node", "2", str(GATED), str(UNWILLING), *words], "--durable-every", "5", GATE_AFTER="28"
    )
    job.until(lambda now: now.min_step >= 18 and all(now.pids) and bool(now.durable_steps))
    return job


def refused(job: Job) -> None:
    """It has ended with one sentence; nothing was made from what was restored, and nothing on disk is given up."""
    assert job.agent.wait(120) == LayoutError.exit_code, job.said()
    last = job.said().strip().splitlines()[-1]
    assert SAID in last, last
    assert "steps are too many; " in last
    assert "The rank takes no step from a partly restored state, and the snapshot is kept" in last
    assert "half restored" not in job.said()
    assert catalog.committed(place.at(str(job.directory)))
    assert not [*job.directory.glob("snapshots/*/REJECTED")]


@pytest.mark.variant
@pytest.mark.parametrize("where", [pytest.param("everywhere", marks=pytest.mark.variant), "rank 1"])
@pytest.mark.parametrize("plain", [False, True], ids=["load_state_dict", "__setstate__"])
def test_a_killed_rank(tmp_path: Path, where: str, plain: bool) -> None:
    job = begun(tmp_path, where, *(["--plain"] if plain else []))
    job.kill_rank(0)
    refused(job)


@pytest.mark.variant
def test_a_killed_agent(tmp_path: Path) -> None:
    job = begun(tmp_path, "rank 1")
    job.kill_everything()
    job.start()
    refused(job)


@pytest.mark.variant
def test_a_rewind_in_place_that_fails_becomes_a_restart(tmp_path: Path) -> None:
    """New processes take the state that those at work did not."""
    expected, _ = undisturbed(UNWILLING, "--steps", "40")
    job = begun(tmp_path, "in place", "--poison", "12", "--marker", str(tmp_path / "poisoned"))
    assert job.finish(120) == 0, job.said()
    assert digest_of(job.printed()) == expected
    assert SAID in job.said()
    assert "half restored" not in job.said()
    assert [incident.rung for incident in job.faults()] == [2]


@pytest.mark.variant
def test_a_rewind_in_place_of_a_thing_that_never_takes_it_is_told(tmp_path: Path) -> None:
    words = ("--where", "rank 1", "--poison", "12", "--marker", str(tmp_path / "poisoned"))
    job = Job(tmp_path, ["--nproc-per-node", "2", str(UNWILLING), *words], "--durable-every", "5")
    refused(job)
