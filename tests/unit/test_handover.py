"""A script's torchruns are handed to agents, in the environment that the script made for them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mt_resilient.agent.launch import handover
from mt_resilient.agent.launch.handover import BIN, SITE, agent, cleaned, environment, far
from mt_resilient.agent.launch.launcher_program import is_script
from mt_resilient.agent.run_directory import next_directory
from mt_resilient.resilience.errors import MachineError, UsageError
from mt_resilient.resilience.report.journal import Journal

AGENT = ["{python}", "-P", "-m", "mt_resilient", "run", "--durable-every", "10", "--label", "it's=a b", "--"]
WORDS = ["--durable-every", "10", "--label", "it's=a b"]


@pytest.mark.parametrize(
    ("known", "change"),
    [
        (None, "$PYTHONPATH"),
        (None, "/a:$PYTHONPATH"),
        (None, "$PYTHONPATH:/a"),
        (None, "/a"),
        ("/b:/c", "$PYTHONPATH"),
        ("/b", "/a:$PYTHONPATH"),
        ("/b", "$PYTHONPATH:/a"),
        ("/b", "/a"),
    ],
)
def test_torchrun_gets_the_environment_that_it_would_have_without_us(known: str | None, change: str) -> None:
    before = {"PATH": "/usr/bin:/bin", **({} if known is None else {"PYTHONPATH": known})}

    def changed(environ: dict[str, str]) -> dict[str, str]:
        done = subprocess.run(
            ["bash", "-c", f"export PYTHONPATH={change} PATH=/opt/bin:$PATH; env -0"], env=environ, capture_output=True
        )
        return dict(pair.split("=", 1) for pair in done.stdout.decode().split("\0") if pair)  # type: ignore[misc]

    without = changed(before)
    if not without["PYTHONPATH"]:  # empty is as good as absent
        del without["PYTHONPATH"]
    ours = changed(environment(WORDS, before))
    assert cleaned(ours) == without
    assert agent(["torchrun", "x.py"], ours)[-7:] == [*WORDS, "--", "torchrun", "x.py"]


@pytest.mark.parametrize(
    ("arguments", "at"),
    [
        (["host", "ls"], 1),
        (["-f", "-n", "host", "cd /x;", "bash", "run.sh"], 3),
        (["-p", "22", "-oBatchMode=yes", "-l", "me", "host", "ls"], 6),
        (["-np22", "host", "-v", "ls", "-l"], 3),
        (["host"], 1),
        (["-p", "22", "host"], 3),
        (["-V"], 1),
        (["-W", "a:22", "host"], 3),
    ],
)
def test_only_the_command_of_an_ssh_changes(arguments: list[str], at: int) -> None:
    environ = environment(WORDS, {"PATH": "/usr/bin"})
    found = far(arguments, environ)
    assert found[:at] == arguments[:at]
    assert len(found) == len(arguments[:at]) + (at < len(arguments))
    assert far(arguments[:at], environ) == arguments[:at]


@pytest.mark.parametrize("shell", ["/bin/sh", "/bin/bash"])
def test_the_far_end_runs_the_command_with_the_variables(shell: str) -> None:
    environ = environment(WORDS, {"PATH": "/usr/bin"})
    command = far(["host", "cd", "/;", "env -0; exit 7"], environ)[-1]
    there = {"PATH": "/usr/bin:/bin", "SHELL": shell}
    done = subprocess.run([shell, "-c", command], env=there, capture_output=True)
    assert done.returncode == 7, done.stderr
    seen = dict(pair.split("=", 1) for pair in done.stdout.decode().split("\0") if pair)  # type: ignore[misc]
    assert seen["PATH"] == f"{BIN}:/usr/bin:/bin"
    assert {name: seen[name] for name in (handover.WRAPS, "PYTHONPATH")} == {
        handover.WRAPS: environ[handover.WRAPS],
        "PYTHONPATH": SITE,
    }
    assert cleaned(seen)["PATH"] == "/usr/bin:/bin"


@pytest.mark.parametrize(
    ("command", "becomes"),
    [
        (["torchrun", "--help"], ["{bin}/torchrun", "--help"]),
        (["python", "{shims}/torchrun", "-h"], ["python", "{bin}/torchrun", "-h"]),
        (["python", "{shims}/torchrun", "x.py"], [*AGENT, "python", "{bin}/torchrun", "x.py"]),
        (["torchrun", "x.py", "--help-me"], [*AGENT, "torchrun", "x.py", "--help-me"]),
        (["ssh", "host"], ["", "host"]),  # there is none
    ],
)
def test_what_becomes_of_a_call(command: list[str], becomes: list[str], tmp_path: Path) -> None:
    (tmp_path / "torchrun").touch(mode=0o755)

    def filled(words: list[str]) -> list[str]:
        return [word.format(bin=tmp_path, shims=BIN, python=sys.executable) for word in words]

    environ = environment(WORDS, {"PATH": str(tmp_path)})
    assert handover.replacement(filled(command), environ) == filled(becomes)


@pytest.mark.parametrize(
    ("command", "script"),
    [
        ([], False),
        (["torchrun", "x.py"], False),
        (["/no/such/torchrun", "x.py"], False),
        (["python3", "-m", "torch.distributed.run", "x.py"], False),
        (["bash", "run.sh"], True),
        (["env", "A=1", "torchrun", "x.py"], True),
        (["python3", "run.py"], True),
    ],
)
def test_what_is_not_torchrun_is_a_script(command: list[str], script: bool) -> None:
    assert is_script(command) is script


@pytest.mark.parametrize(
    "command", [["accelerate", "launch", "x.py"], ["deepspeed", "x.py"], ["python3", "-m", "lightning", "run"]]
)
def test_launchers_without_torchrun_are_refused_with_the_way_out(command: list[str]) -> None:
    with pytest.raises(UsageError, match=r"starts the ranks by itself.* mt-resilient run -- torchrun"):
        is_script(command)


def test_a_command_that_does_not_exist_is_refused() -> None:
    with pytest.raises(MachineError, match="no-such-program was not found; nothing was started"):
        is_script(["no-such-program"])


def run_of(path: Path, *arguments: str, finished: bool = False) -> Path:
    path.mkdir(parents=True)
    Journal(path / "journal.jsonl").write("start", 0.0, arguments=list(arguments))
    if finished:
        (path / "finished").touch()
    return path


def test_a_script_given_again_finds_the_run_directory_of_each_of_its_torchruns(tmp_path: Path) -> None:
    """The first stage is finished, the second one was killed."""
    base = tmp_path / "train"
    assert next_directory(base, ["a"]) == base
    run_of(base, "a", finished=True)
    second = tmp_path / "train.2"
    assert next_directory(base, ["b"]) == second
    run_of(second, "b")
    third = tmp_path / "train.3"
    assert next_directory(base, ["a"]) == third  # the script does its first stage again, as without us
    run_of(third, "a", finished=True)
    assert next_directory(base, ["b"]) == second
    assert next_directory(base, ["c"]) == second  # refused there, with the difference: its progress may be wanted


def test_bin_is_executable() -> None:
    assert all(os.access(f"{BIN}/{name}", os.X_OK) for name in ("torchrun", "ssh"))
