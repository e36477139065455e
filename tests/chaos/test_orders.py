"""Orders from another terminal and signals from a scheduler, to real processes: what was asked for is what happens, and the bits are
those of a run that nobody has ordered about."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from mt_resilient.agent.cli import explain
from mt_resilient.agent.run_directory import RunDirectory
from mt_resilient.checkpoint.backend.filesystem import Files
from mt_resilient.checkpoint.backend.paths import Attempt
from mt_resilient.checkpoint.durable import catalog

from ..harness import GATED, MINIMAL, Job, cli, digest_of, step_lines, undisturbed

STEPS = "300"


def minimal(place: Path, *options: str) -> Job:
    place.mkdir(exist_ok=True)
    command = ["--nproc-per-node", "2", str(GATED), str(MINIMAL), "--steps", STEPS, "--step-delay", "0.02"]
    return Job(place, command, "--durable-every", "10", "--set", "snapshots.keep=50", *options)


def order(job: Job, *words: str) -> tuple[int, str]:
    """Exit code, and the answer; an error if there is none."""
    done = cli(*words, "--run-dir", str(job.directory))
    return done.returncode, (done.stdout or done.stderr).strip()


def pause(job: Job) -> tuple[int, str]:
    """Order a pause of ranks that are at the gate, or come to it; they pass it when the order is theirs."""
    with ThreadPoolExecutor() as terminals:
        sent = terminals.submit(order, job, "pause")
        job.until(lambda _: bool((world := explain.look(RunDirectory(job.directory))) and world.present.paused))
        job.gate.touch()
        said = sent.result()
    job.gate.unlink()
    return said


def on_disk(job: Job) -> int:
    attempt = Attempt.parse(catalog.committed(Files(job.directory))[0].name)
    assert attempt
    return attempt.stamp.step


def test_paused_sent_back_hit_by_a_kill_and_let_go_on(tmp_path: Path) -> None:
    """The batches stay left out, and the ranks that come after the kill wait as those before them did."""
    job = minimal(tmp_path / "hit")
    job.until_step(12)
    code, said = pause(job)
    assert (code, said) == (
        0,
        f"all ranks wait after step {job.until_step(12).min_step}; processes and memory stay as they are",
    )
    reached = job.until(lambda now: now.paused).min_step
    assert "paused: all ranks wait" in order(job, "status")[1]
    code, said = order(job, "snapshot", "now")
    assert code == 0
    step, _, directory = said.partition(" is on disk: ")
    assert (step, Path(directory).is_dir()) == (f"step {reached}", True), said
    pids = job.until(lambda now: now.paused).pids
    code, said = order(job, "rewind", "--to", "10", "--skip", "5")
    assert (code, said) == (0, "all ranks have restored step 10, and skip batches 10 to 14")
    assert job.until(lambda now: now.paused and now.min_step == 10).pids == pids, "no process was restarted"
    job.kill_rank(1)
    job.until(lambda now: now.generation == 2 and now.paused)
    assert reached > 10
    assert order(job, "resume")[0] == 0
    assert job.finish() == 0, job.said()[-3000:]
    told = [(i.cause, i.rung, i.remedy) for i in job.faults()]
    assert told == [("ordered", 1, "skip"), ("rank_killed", 2, "")], job.said()
    assert job.faults()[1].lost_steps == 0
    clean = minimal(tmp_path / "clean", "--skip-data", "10:15")
    assert clean.finish() == 0
    assert digest_of(job.printed()) == digest_of(clean.printed())
    assert step_lines(job.printed()) == step_lines(clean.printed())


def test_an_ordered_snapshot_is_come_back_to_after_a_rewind_before_it(tmp_path: Path) -> None:
    """The batches that were to be left out are used; then a rank is killed, and the lineage stays that of the snapshot."""
    expected, _ = undisturbed(MINIMAL, "--steps", "260")
    command = ["--nproc-per-node", "2", str(GATED), str(MINIMAL), "--steps", "260", "--step-delay", "0.02"]
    job = Job(tmp_path, command, "--durable-every", "10", "--set", "snapshots.keep=50", GATE_AFTER="50")
    job.until_step(45)
    assert pause(job)[0] == 0
    code, said = order(job, "snapshot", "now")
    ordered = Path(said.partition(" is on disk: ")[2])
    assert (code, ordered.is_dir()) == (0, True), said
    step = int(ordered.name[:10])
    job.until(lambda _: (ordered / "ORDERED").exists())
    done = cli("rewind", "--to", "20", "--skip", "200", "--run-dir", str(job.directory))
    assert (done.returncode, done.stdout) == (0, "all ranks have restored step 20, and skip batches 20 to 219\n")
    comes_back = f" and {step}. To come back: mt-resilient rewind --to {ordered.name} --run-dir {job.directory}\n"
    assert comes_back in done.stderr
    job.until(lambda now: 20 in now.durable_steps and step not in now.durable_steps)
    job.until(lambda _: (ordered / "LEFT-1").exists())
    assert f"{ordered.name}  set aside at " in order(job, "snapshots", "ls", "--all")[1]
    assert order(job, "rewind", "--to", str(step)) == (0, f"all ranks have restored step {step}")
    code, said = order(job, "snapshots", "rm", ordered.name)
    assert (code, "Nothing was removed" in said) == (2, True), said
    job.until(lambda now: now.generation == 2 and step in now.durable_steps)
    job.kill_rank(1)
    job.until(lambda now: now.generation == 3 and now.paused)
    assert order(job, "resume")[0] == 0
    assert job.finish() == 0, job.said()[-3000:]
    assert digest_of(job.printed()) == expected
    assert [(i.cause, i.rung) for i in job.faults()] == [("ordered", 1), ("ordered", 2), ("rank_killed", 2)]


@pytest.mark.variant
def test_sent_back_while_it_trains_drained_and_started_again(tmp_path: Path) -> None:
    """The second order is carried out when the first one is."""
    expected, _ = undisturbed(MINIMAL, "--steps", "60")
    command = ["--nproc-per-node", "2", str(GATED), str(MINIMAL), "--steps", "60", "--step-delay", "0.02"]
    job = Job(tmp_path, command, "--durable-every", "10", "--set", "snapshots.keep=50")
    job.until(lambda now: now.min_step >= 30 and 20 in now.durable_steps)
    refused = (2, "no snapshot of step 7 is kept: the nearest is 10. Nothing was done")
    assert order(job, "rewind", "--to", "7") == refused
    with ThreadPoolExecutor() as terminals:
        sent = terminals.submit(order, job, "rewind", "--to", "20")
        job.until_said("ordered a rewind to step 20")
        paused = terminals.submit(order, job, "pause")
        job.until(lambda now: len(explain.look(RunDirectory(job.directory)).requests) == 2)
        job.gate.touch()  # from here on the ranks come to their boundaries again
        assert sent.result() == (0, "all ranks have restored step 20")
        assert paused.result()[0] == 0
    code, said = order(job, "drain", os.uname().nodename)
    assert code == 0, said
    assert job.finish() == 0, "it has left in order"
    drained = on_disk(job)
    assert (
        said
        == f"node {os.uname().nodename} is drained by {said.split()[5].rstrip(';')}; the same command continues from step {drained}"
    )
    before = job.printed()
    last = [line for line in before.splitlines() if line.startswith("step ")][-1]
    assert last.startswith(f"step {drained - 1} "), "no step is lost"
    job.start()
    assert job.finish() == 0, job.said()[-3000:]
    assert digest_of(job.printed()) == expected
    further = job.printed()[len(before) :]
    assert step_lines(further)[0].startswith(f"step {drained} "), "and none is computed twice"
    assert [(i.cause, i.rung) for i in job.faults()] == [("ordered", 1)]


@pytest.mark.variant
def test_a_preemption_while_paused_leaves_the_very_step_on_disk(tmp_path: Path) -> None:
    job = minimal(tmp_path, "--durable-every", "1000")
    job.until_step(12)
    assert pause(job)[0] == 0
    reached = job.until(lambda now: now.paused).min_step
    job.agent.send_signal(signal.SIGUSR2)
    assert job.finish(30) == 128 + signal.SIGUSR2
    assert on_disk(job) == reached


@pytest.mark.variant
def test_a_scheduler_that_signals_every_process_costs_what_memory_does_not_have(tmp_path: Path) -> None:
    """SIGTERM ends the ranks at once: what they had sealed is written, and nobody takes their death for a fault."""
    job = minimal(tmp_path, "--durable-every", "1000")
    reached = job.until_step(20).min_step
    agent = psutil.Process(job.agent.pid)
    everybody = [agent, *agent.children(recursive=True)]
    for process in everybody:
        process.send_signal(signal.SIGTERM)
    for process in everybody[:1]:  # and once more, as one that signals both steps and processes does
        process.send_signal(signal.SIGTERM)
    assert job.finish(60) == 128 + signal.SIGTERM
    assert on_disk(job) >= reached - 2, job.said()
    assert not job.faults()
