"""A launch as sites have it: a torchrun that is a wrapper, words and paths of any bytes, a Python without torch, another model."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mt_resilient import cli
from mt_resilient.resilience.report.journal import Journal

from ..harness import BIN, Job, environment

ODD = "\udcff"
"""The byte 0xff, as Python writes what is not UTF-8."""
SCRIPT = """
import json, os, sys, time
told = {"argv": sys.argv[1:], "odd": os.environ["ODD"], "site": os.environ.get("SITE_VARIABLE")}
with open(os.environ["TOLD"], "a") as file:
    file.write(json.dumps(told) + "\\n")
while not os.path.exists(os.environ["GATE"]):
    time.sleep(0.05)
"""
SAVES = """
import os, signal, sys, time
place = os.environ["SAVED"] + "-" + os.environ["RANK"]
def save(number, _):
    time.sleep(0.5)
    open(place, "w").write(f"saved at {number}")
    sys.exit(0)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGUSR1):
    signal.signal(number, save)
open(place, "w").close()
time.sleep(100)
"""
LEAVES = """
import subprocess, sys
left = subprocess.Popen(["sleep", "100"], start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
open(sys.argv[1], "w").write(str(left.pid))
"""
MODEL = """
import os
from torch import nn, optim
from mt_resilient import Session
model = nn.Sequential(*(nn.Linear(4, int(os.environ["WIDTH"])) for _ in range(5)))
session = Session(model=model, optimizer=optim.SGD(model.parameters(), lr=0.1))
for step in session.steps(5):
    session.report(loss=1.0)
    if step == 3:
        raise SystemExit(0)
"""
WORDS = (ODD, "a\nb", "", "--lr", "-m", "--", "x" * 100_000)


def run(place: Path, *words: str, **extra: str) -> subprocess.CompletedProcess[str]:
    command = [str(BIN / "mt-resilient"), "run", "--metrics-port", "0", "--run-dir", str(place / "run"), *words]
    return subprocess.run(command, env=environment(**extra), capture_output=True, text=True, timeout=120)


@pytest.mark.variant
def test_a_wrapper_s_variables_and_words_of_any_bytes_reach_every_life(tmp_path: Path) -> None:
    place = tmp_path / f"o{ODD}\nut dir"
    wrapper, script, told = place / "bin" / "torchrun", place / f"tr{ODD}ain.py", tmp_path / "told"
    wrapper.parent.mkdir(parents=True)
    wrapper.write_text(f'#!/bin/sh\nexport SITE_VARIABLE=set\nexec {BIN / "torchrun"} "$@"\n')
    wrapper.chmod(0o755)
    script.write_text(SCRIPT)
    path = f"{wrapper.parent}:{BIN}:{os.environ['PATH']}"
    job = Job(place, [str(script), *WORDS], PATH=path, TOLD=str(told), ODD=f"v{ODD}\n")
    job.until(lambda now: all(now.pids) and told.exists())
    job.kill_rank(0)
    job.until(lambda now: now.generation == 2 and told.read_text().count("\n") == 2)
    assert job.finish() == 0, job.said()
    plain = [sys.executable, str(BIN / "torchrun"), str(script), *WORDS]
    subprocess.run(
        plain, env={**environment(), "ODD": f"v{ODD}\n", "TOLD": str(told), "GATE": str(job.gate)}, check=True
    )
    first, second, under_torchrun = map(json.loads, told.read_text().splitlines())
    assert first == second == {**under_torchrun, "site": "set"}
    (incident,) = job.faults()
    assert re.match(
        r"cold: .*torchrun is not torch's own torchrun, and may set what ranks need", incident.launch, re.DOTALL
    )
    assert r"o\xff\nut dir/run" in job.said()
    explained = subprocess.run(
        [BIN / "mt-resilient", "explain", "--run-dir", job.directory],
        env=environment(PYTHONUTF8="0", PYTHONCOERCECLOCALE="0", LC_ALL="C"),
        capture_output=True,
    )
    assert explained.returncode == 0, explained.stderr


@pytest.mark.variant
@pytest.mark.parametrize(
    ("number", "seen", "words"),
    [
        pytest.param(signal.SIGINT, signal.SIGINT, [], marks=pytest.mark.variant),
        (signal.SIGTERM, signal.SIGTERM, []),
        pytest.param(signal.SIGQUIT, signal.SIGQUIT, [], marks=pytest.mark.variant),
        pytest.param(signal.SIGUSR1, signal.SIGTERM, [], marks=pytest.mark.variant),
        (signal.SIGUSR1, signal.SIGUSR1, ["--signals-to-handle", "SIGTERM,SIGUSR1"]),
    ],
)
def test_a_script_without_a_loop_of_ours_may_save_at_a_signal(
    tmp_path: Path, number: signal.Signals, seen: signal.Signals, words: list[str]
) -> None:
    """seen: the signal that the script gets. words: options of torchrun."""
    (script := tmp_path / "saves.py").write_text(SAVES)
    job = Job(tmp_path, [*words, str(script)], SAVED=str(tmp_path / "saved"))
    job.until(lambda now: all(now.pids) and (tmp_path / "saved-0").exists())
    job.agent.send_signal(number)
    assert job.agent.wait(60) == 128 + number, job.said()
    assert (tmp_path / "saved-0").read_text() == f"saved at {seen:d}"
    assert "passing the signal on to its ranks" in job.said()


@pytest.mark.variant
def test_what_a_script_leaves_running_at_its_end_runs_on(tmp_path: Path) -> None:
    """An upload, say."""
    script, pid = tmp_path / "leaves.py", tmp_path / "pid"
    script.write_text(LEAVES)
    done = run(tmp_path, "--no-warm", "--", "torchrun", str(script), str(pid))
    assert done.returncode == 0, done.stderr
    os.kill(int(pid.read_text()), signal.SIGTERM)  # raises where there is none


@pytest.mark.variant
def test_a_snapshot_of_another_model_ends_the_job_after_one_start(tmp_path: Path) -> None:
    """In a directory whose name is not UTF-8, where snapshots go all the same."""
    place = tmp_path / f"o{ODD}ut"
    place.mkdir()
    script = place / "model.py"
    script.write_text(MODEL)
    words = ("--no-warm", "--durable-every", "2", "--", "torchrun", str(script))
    done = run(place, *words, WIDTH="3")
    assert done.returncode == 0, done.stderr
    assert "the same command continues from step 2" in done.stderr
    done = run(place, *words, WIDTH="5")
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("generation 2") == 1
    assert "generation 3" not in done.stderr
    assert "restore.py" not in done.stderr  # nor any other line of ours
    assert "0.weight: the snapshot holds float32 (3, 4), this run has float32 (5, 4), " in done.stderr
    assert "and so on (10 tensors); the snapshot was taken with another model" in done.stderr


def test_a_torch_that_cannot_be_imported_is_said_after_one_start(tmp_path: Path) -> None:
    package = tmp_path / "torch" / "distributed"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "run.py").touch()
    why = "libmissing.so.1: cannot open shared object file"
    (tmp_path / "torch" / "__init__.py").write_text(f"raise ImportError({why!r})\n")
    (tmp_path / "train.py").touch()
    done = run(tmp_path, "--no-warm", "--", "torchrun", str(tmp_path / "train.py"), PYTHONPATH=str(tmp_path))
    assert done.returncode == 3, done.stderr
    assert f"cannot import torch: ImportError: {why}" in done.stderr
    starts = [e for e in Journal(tmp_path / "run" / "journal.jsonl").read() if "starts from" in e.get("sentence", "")]
    assert len(starts) == 1


def test_a_python_without_us_runs_the_ranks_as_torchrun_does(tmp_path: Path) -> None:
    """A stand-in for torch's launcher that starts one rank: what a rank's Python finds, and that the job ends with it."""
    package = tmp_path / "torch" / "distributed"
    package.mkdir(parents=True)
    (tmp_path / "torch" / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "run.py").write_text("import os; print('hooked', 'training/site' in os.environ['PYTHONPATH'])")
    (tmp_path / "train.py").touch()
    isolated = [sys.executable, "-S", "-m", "torch.distributed.run", str(tmp_path / "train.py")]
    done = run(tmp_path, "--", *isolated, PYTHONPATH=str(tmp_path), PYTHON_EXEC=without_site(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "hooked False" in done.stdout
    assert done.stderr.count("ranks run as under torchrun alone, unwatched") == 1


def without_site(place: Path) -> str:
    """A Python that finds no package of its environment."""
    program = place / "python"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    program.chmod(0o755)
    return str(program)


@pytest.mark.parametrize(
    ("python", "sentence"),
    [
        (
            [sys.executable, "-S", "-m", "torch.distributed.run"],
            "has no torch (torch.distributed.run); nothing was started",
        ),
        (["./python", "-m", "torch.distributed.run"], "does not run Python (not today); nothing was started"),
        (["./nowhere/python3", "-m", "torch.distributed.run"], "does not run Python"),
    ],
)
def test_a_python_that_cannot_start_torchrun_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    python: list[str],
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "python").write_text("#!/bin/sh\necho not today >&2\nexit 1\n")
    (tmp_path / "python").chmod(0o755)
    assert cli.main(["run", "--run-dir", "run", "--", *python, "train.py"]) == 3
    (line,) = capfd.readouterr().err.splitlines()
    assert sentence in line
    assert not (tmp_path / "run").exists()


def test_a_working_directory_that_is_gone_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert cli.main(["run", "--run-dir", str(tmp_path / "run"), "--", "torchrun", "train.py"]) == 3
    (line,) = capfd.readouterr().err.splitlines()
    assert "the working directory cannot be found" in line
    assert not (tmp_path / "run").exists()
