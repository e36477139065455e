"""Copies of the state go bad, in memory or on disk: it is found before a step is computed, and another tier gives the same bits."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from mt_resilient.checkpoint.arena.arena import Slot, State

from ..harness import GATED, MINIMAL, Job, cli, digest_of, undisturbed

STEPS = 60


@pytest.fixture
def expected() -> str:
    return undisturbed(MINIMAL, "--steps", str(STEPS))[0]


def waiting_at_the_gate(place: Path) -> Job:
    """Its ranks have done 30 steps; snapshots of the last ones are in memory, those of the steps 10 and 20 on disk."""
    job = at_the_gate(place, "--durable-every", "10")
    job.until_said("step 20 is on disk")
    job.until_step(30)
    time.sleep(1)  # until the snapshot of step 29 is sealed
    return job


def at_the_gate(place: Path, *options: str) -> Job:
    command = ["--nproc-per-node", "2", str(GATED), str(MINIMAL), "--steps", str(STEPS), "--step-delay", "0.01"]
    return Job(place, command, *options)


def slots(job: Job, rank: int) -> list[Slot]:
    """Those of a local rank that are sealed, the newest first."""
    home = Path(f"/proc/{job.agent.pid}/fd")
    links = {name: os.readlink(home / name) for name in os.listdir(home) if (home / name).is_symlink()}
    opened = [Slot(str(home / name)) for name, to in links.items() if to.startswith(f"/memfd:mt-resilient-{rank}-")]
    sealed = {slot.header().step: slot for slot in opened if slot.header().state is State.SEALED}
    return [sealed[step] for step in sorted(sealed, reverse=True)]


def damage(slot: Slot) -> int:
    """One bit of its first tensor flips; the step that it holds."""
    with slot.reading() as view:
        assert view is not None
        view.memory[5] ^= 16
        return view.header.step


def test_a_bad_copy_in_memory_costs_one_more_step(tmp_path: Path, expected: str) -> None:
    job = waiting_at_the_gate(tmp_path)
    newest, older, *_ = slots(job, 1)
    bad, good = damage(newest), older.header().step
    job.kill_rank(0)
    assert job.finish() == 0, job.said()
    assert digest_of(job.printed()) == expected
    assert f"going back to step {bad} from memory" in job.said()
    assert f"going back to step {good} from memory" in job.said()
    assert [incident.cause for incident in job.faults()] == ["rank_killed", "snapshot_unusable"]


@pytest.mark.variant
def test_where_all_copies_in_memory_are_bad_the_disk_has_the_state(tmp_path: Path, expected: str) -> None:
    job = waiting_at_the_gate(tmp_path)
    bad = [damage(slot) for slot in slots(job, 1)]
    job.kill_rank(0)
    assert job.finish() == 0, job.said()
    assert digest_of(job.printed()) == expected
    assert "going back to step 20 from disk" in job.said()
    causes = [incident.cause for incident in job.faults()]
    assert causes == ["rank_killed", *["snapshot_unusable"] * len(bad)]
    assert "its copy in memory is damaged: tensor" in job.said()
    assert "arrived with the fingerprint" in job.said()


@pytest.mark.variant
def test_a_bad_snapshot_on_disk_gives_way_to_the_one_before_it(tmp_path: Path, expected: str) -> None:
    job = waiting_at_the_gate(tmp_path)
    job.kill_everything()
    (shard,) = (job.directory / "snapshots").glob("0000000020-*/rank-00001/c/0/0")
    with shard.open("r+b") as file:
        file.seek(77)
        file.write(b"\x55\xaa")
    job.start()
    assert job.finish() == 0, job.said()
    assert digest_of(job.printed()) == expected
    assert "going back to step 10 from disk" in job.said()
    assert (shard.parents[3] / "REJECTED").exists()
    assert [incident.cause for incident in job.faults()] == ["agent_restarted", "snapshot_unusable"]


@pytest.mark.variant
def test_an_older_snapshot_is_in_memory_where_the_newer_ones_are_bad(tmp_path: Path, expected: str) -> None:
    """Nothing is on disk; of five slots one holds a snapshot that is at least ten steps old."""
    more = ("slots=5", "reach_steps=10", "durable_every_steps=1000")
    job = at_the_gate(
        tmp_path,
        *(word for key in more for word in ("--set", f"snapshots.{key}")),
        "--set",
        "recovery.max_without_progress=9",
    )
    memory = job.until(lambda now: now.memory_steps == (10, 20, 28, 29)).memory_steps
    shown = cli("status", "--run-dir", str(job.directory))
    assert ", ".join(map(str, memory)) in shown.stdout
    bad = [damage(slot) for slot in slots(job, 1) if slot.header().step > 20]
    assert len(bad) == 2
    job.kill_rank(0)
    job.until(lambda now: now.generation == 4 and now.memory_steps == (30, 40, 48, 49))  # at the gate again
    assert "going back to step 20 from memory" in job.said()
    assert job.finish() == 0, job.said()
    assert digest_of(job.printed()) == expected
