"""A script's torchruns are handed to agents, in the environment that the script made for them."""

import os
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mt_resilient.agent.launch import handover
from mt_resilient.agent.launch.handover import BIN, SITE, agent, cleaned, environment, far
from mt_resilient.agent.launch.launcher_program import is_script
from mt_resilient.agent.launch.torchrun import Launch
from mt_resilient.agent.run_choice import default_directory, next_directory, take_one
from mt_resilient.agent.run_directory import RunDirectory
from mt_resilient.checkpoint.backend import paths
from mt_resilient.resilience.clock import wall_s
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
        (None, "/a${PYTHONPATH:+:$PYTHONPATH}"),
        (None, "${PYTHONPATH:+$PYTHONPATH:}/a"),
        (None, "/a${PYTHONPATH:+:$PYTHONPATH}:/c"),
        ("/b", "/a${PYTHONPATH:+:$PYTHONPATH}"),
        ("/b:/c", "$PYTHONPATH"),
        ("/b", "/a:$PYTHONPATH"),
        ("/b", "$PYTHONPATH:/a"),
        ("/b", "/a"),
    ],
)
@pytest.mark.parametrize("in_a_file", [False, True])
def test_torchrun_gets_the_environment_that_it_would_have_without_us(
    known: str | None, change: str, in_a_file: bool, tmp_path: Path
) -> None:
    script = f"export PYTHONPATH={change} PATH=/opt/bin:$PATH; /usr/bin/env -0"
    (tmp_path / "run.sh").write_text(script)
    command = ["bash", str(tmp_path / "run.sh")] if in_a_file else ["bash", "-c", script]
    before = {"PATH": "/usr/bin:/bin", **({} if known is None else {"PYTHONPATH": known})}

    def changed(environ: dict[str, str]) -> dict[str, str]:
        done = subprocess.run(command, env=environ, capture_output=True)
        return dict(pair.split("=", 1) for pair in done.stdout.decode().split("\0") if pair)  # type: ignore[misc]

    without = changed(before)
    if not without["PYTHONPATH"]:  # empty is as good as absent
        del without["PYTHONPATH"]
    ours = changed(environment(WORDS, before, command))
    assert cleaned(ours) == without
    assert agent(["torchrun", "x.py"], ours)[-7:] == [*WORDS, "--", "torchrun", "x.py"]


@pytest.mark.parametrize(
    ("arguments", "at"),
    [
        (["host", "bash", "run.sh"], 1),
        (["-f", "-n", "host", "cd /x;", "bash", "run.sh"], 3),
        (["-p", "22", "-oBatchMode=yes", "-l", "me", "host", "python", "-V"], 6),
        (["-np22", "host", "-v", "sh", "-l"], 3),
        (["host"], 1),
        (["-p", "22", "host"], 3),
        (["-V"], 1),
        (["-W", "a:22", "host"], 3),
        (["-W", "a:22", "host", "bash"], 4),  # ssh runs no command
        (["-x", "-a", "host", "-s", "sftp"], 5),
        (["-s", "host", "bash"], 3),
        (["-N", "host", "bash"], 3),
    ],
)
def test_only_the_command_of_an_ssh_changes(arguments: list[str], at: int) -> None:
    environ = environment(WORDS, {"PATH": "/usr/bin"})
    found = far(arguments, environ)
    assert found[:at] == arguments[:at]
    assert len(found) == len(arguments[:at]) + (at < len(arguments))
    assert far(arguments[:at], environ) == arguments[:at]


@pytest.mark.parametrize(
    ("command", "changes"),
    [
        ("bash run.sh", True),
        ("bash -c 'cd /x; bash inner.sh 1 > log 2>&1 &'", True),
        ("cd /x && ./run.sh 1", True),
        ("cd /x;nohup torchrun x.py >log 2>&1 </dev/null &", True),
        ("export A=1\n/opt/bin/python3.11 -m torch.distributed.run x.py", True),
        ("env -u B A=1 setsid /bin/zsh -c x", True),
        ("A=1 B='x y' python x.py", True),
        ("if test -e x; then source env.sh; fi", True),
        ("(cd /x; timeout 5 sh x)", True),
        ("git-upload-pack '/srv/python'", False),
        ("git-receive-pack 'tools/run.sh'", False),
        ("rsync --server -e.LsfxCIvu . /backup/torchrun", False),
        ("/usr/lib/openssh/sftp-server", False),
        ("nvidia-smi", False),
        ("mkdir -p /x/python && cp run.sh /x/python", False),
        ("pkill -f torchrun", False),
        ("echo 'bash run.sh", False),  # no shell would run it
        ('"$PYTHON" -m torch.distributed.run a.py', True),
        ("conda run -n x torchrun a.py", True),
        ("command torchrun x", True),
        ("flock /tmp/l torchrun a.py", True),
        ("tmux new -d 'torchrun a.py'", True),
        ("cd /x && ./launch_node 3", True),
        ("# don't\ntorchrun a.py", True),
        ("ls /x; which torchrun", False),
    ],
)
def test_only_an_ssh_command_that_may_start_torchrun_changes(command: str, changes: bool) -> None:
    """A far end may allow certain commands only, and compares them word by word."""
    found = far(["-T", "host", command], environment(WORDS, {"PATH": "/usr/bin"}))
    assert (found != ["-T", "host", command]) is changes


def test_the_far_end_s_start_files_are_read_once(tmp_path: Path) -> None:
    """sshd runs the command in a bash that reads ~/.bashrc."""
    (tmp_path / ".bashrc").write_text("echo read\nconda() { echo function $1; }\n")
    command = far(["host", "sh -c 'echo ran'; conda activate"], environment(WORDS, {"PATH": "/usr/bin"}))[-1]
    there = {"PATH": "/usr/bin:/bin", "SHELL": "/bin/bash", "HOME": str(tmp_path), "SSH_CLIENT": "::1 1 22"}
    done = subprocess.run(["bash", "-c", command], env=there, capture_output=True, text=True)
    assert done.stdout == "read\nran\nfunction activate\n"


@pytest.mark.parametrize("shell", ["/bin/sh", "/bin/bash"])
def test_the_far_end_runs_the_command_with_the_variables(shell: str) -> None:
    environ = environment(WORDS, {"PATH": "/usr/bin"})
    command = far(["host", "cd", "/;", "sh -c 'env -0; exit 7'"], environ)[-1]
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


@pytest.mark.parametrize("given", [{}, {"LC_CTYPE": "C"}, {"LC_CTYPE": "POSIX", "LANG": "C"}, {"LC_ALL": "C"}], ids=str)
def test_a_script_gets_the_locale_that_it_was_given(given: dict[str, str]) -> None:
    """Python itself sets LC_CTYPE in the C locale (PEP 538), as in a container without LANG."""
    root = str(Path(handover.__file__).parents[3])
    code = "import os; from mt_resilient.agent.launch.handover import become; become(['env', '-0'], os.environ)"
    environ = {"PATH": "/usr/bin:/bin", "PYTHONPATH": root, **given}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    assert dict(pair.split("=", 1) for pair in done.stdout.split("\0") if pair) == environ, done.stderr  # type: ignore[misc]


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


@pytest.mark.parametrize(
    ("command", "cure"),
    [
        (["mpirun", "-np", "2", "torchrun", "x.py"], "mpirun -np 2 mt-resilient run -- torchrun …"),
        (["mpirun", "/a b/torchrun", "x.py"], "mpirun mt-resilient run -- '/a b/torchrun' …"),
        (["mpirun", "python3", "-m", "torch.distributed.run", "x.py"], "mpirun mt-resilient run -- python3 …"),
    ],
)
def test_a_launcher_that_starts_torchrun_gets_an_agent_within(command: list[str], cure: str) -> None:
    """mpirun gives the programs on other hosts none of our variables, so they would run without agents."""
    with pytest.raises(UsageError, match="nothing was started") as refused:
        is_script(command)
    assert str(refused.value).endswith(f"put mt-resilient right in front of torchrun: {cure}")


def test_a_command_that_does_not_exist_is_refused() -> None:
    with pytest.raises(MachineError, match="no-such-program was not found; nothing was started"):
        is_script(["no-such-program"])


def test_a_script_that_is_not_executable_is_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "run.sh").touch(mode=0o644)
    with pytest.raises(UsageError, match=r"run.sh is not executable; nothing was started. Put bash in front of it"):
        is_script([str(tmp_path / "run.sh")])


def wrapped(*words: str | Path, place: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "mt_resilient", "run", *words]
    return subprocess.run(command, cwd=place, env={**os.environ, **environ}, capture_output=True, text=True, timeout=60)


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.touch(mode=0o755)
    path.write_text(text)
    return path


def test_a_script_begins_as_a_shell_would_begin_it(tmp_path: Path) -> None:
    """Python ignores SIGPIPE (13) and SIGXFSZ (25), and refuses a script without a first line."""
    script = executable(tmp_path / "run", 'grep SigIgn /proc/self/status; echo "$0 $1"\n')
    done = wrapped("--quiet", "--", script, "a b", place=tmp_path)
    assert int(done.stdout.split()[1], 16) & (1 << 12 | 1 << 24) == 0, done.stderr
    assert done.stdout.splitlines()[1:] == [f"{script} a b"]


def test_a_script_without_a_first_line_runs_in_bash_and_a_foreign_program_not_at_all(tmp_path: Path) -> None:
    script = executable(tmp_path / "run", "[[ 1 == 1 ]] && echo bash\n")
    assert wrapped("--quiet", "--", script, place=tmp_path).stdout == "bash\n"
    (tmp_path / "program").write_bytes(b"\x7fELF\0\0\necho ran\n")
    (tmp_path / "program").chmod(0o755)
    done = wrapped("--quiet", "--", tmp_path / "program", place=tmp_path)
    assert (done.returncode, done.stdout) == (3, ""), done.stderr


def test_a_script_whose_torchruns_may_have_no_agent_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("export PYTHONPATH=$PWD\necho python -m torch.distributed.run x.py\n")
    done = wrapped("--quiet", "--", "bash", "run.sh", place=tmp_path)
    assert done.stdout == "python -m torch.distributed.run x.py\n"
    assert done.stderr.startswith("mt-resilient: run.sh:1: export PYTHONPATH=$PWD (replaces PYTHONPATH; ")
    assert done.stderr.count("\n") == 1


def test_a_script_that_cannot_be_run_is_one_sentence(tmp_path: Path) -> None:
    script = executable(tmp_path / "run", "#!/no/such/shell\n")
    done = wrapped("--quiet", "--", script, place=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (3, "", 1)
    assert "run cannot be run (No such file or directory); nothing was started" in done.stderr


def test_an_agent_hears_the_signals_that_a_shell_ignores_in_the_background(tmp_path: Path) -> None:
    """torchrun hears SIGINT (2) and SIGQUIT (3), too. SIGHUP (1) stays ignored, for nohup."""
    agents = executable(tmp_path / "python", "#!/bin/sh\nexec grep SigIgn /proc/self/status\n")
    environ = environment(WORDS, os.environ) | {handover.PYTHON: str(agents)}
    command = f"trap '' HUP INT QUIT; exec {sys.executable} -I -S {handover.__file__} torchrun x.py"
    done = subprocess.run(["bash", "-c", command], env=environ, capture_output=True, text=True, check=True)
    assert int(done.stdout.split()[1], 16) & (0b111 | 1 << 12 | 1 << 24) == 0b001


def test_variables_that_a_script_exports_again_in_quotes_are_read(tmp_path: Path) -> None:
    """ColossalAI writes the whole environment as `export K="V"`."""
    agents = executable(tmp_path / "python", '#!/bin/sh\nprintf "%s|" "$@"\n')
    environ = environment(WORDS, os.environ) | {handover.PYTHON: str(agents)}
    export = f'export {handover.WRAPS}="{environ[handover.WRAPS]}"'
    command = f"{export}; exec {sys.executable} -I -S {handover.__file__} torchrun x.py"
    done = subprocess.run(["bash", "-c", command], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.split("|")[:-1] == ["-P", "-m", "mt_resilient", "run", *WORDS, "--", "torchrun", "x.py"]


@pytest.mark.parametrize("value", ["", "[broken", "7b7d7", "5b22"])
@pytest.mark.parametrize("command", [["torchrun"], ["python3", f"{BIN}/torchrun"]])
def test_a_torchrun_whose_variables_are_spoilt_runs_without_an_agent(
    value: str, command: list[str], tmp_path: Path
) -> None:
    executable(tmp_path / "own" / "torchrun", "#!/usr/bin/env python3\nimport sys; print(sys.argv[1:]); sys.exit(9)\n")
    environ = environment(WORDS, {"PATH": f"{tmp_path}/own:{os.environ['PATH']}"}) | {handover.WRAPS: value}
    words = [sys.executable, "-I", "-S", handover.__file__, *command, "x.py"]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (9, "['x.py']\n"), done.stderr
    assert done.stderr == (
        "mt-resilient: the script has changed MT_RESILIENT_WRAPS. This torchrun runs without mt-resilient\n"
    )


@pytest.mark.parametrize("options", [["-I"], ["-W", "error", "-I"], ["-E", "-s"]], ids=str)
def test_a_python_without_pythonpath_that_runs_our_torchrun_hands_it_over(options: list[str], tmp_path: Path) -> None:
    """`python -I $(which torchrun)`"""
    told = executable(tmp_path / "told", f'#!/bin/sh\n[ "$2" = -c ] && exec {sys.executable} "$@"\nprintf "%s|" "$@"\n')
    environ = environment(WORDS, {"PATH": os.environ["PATH"]}) | {handover.PYTHON: str(told)}
    environ["PYTHONPATH"] = str(Path(handover.__file__).parents[3])
    command = [sys.executable, *options, f"{BIN}/torchrun", "x.py"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=30)
    here, *words = done.stdout.split("|")[2:-1]
    assert (Path(here).resolve(), words) == (Path(handover.__file__), [*command]), done.stderr


@pytest.mark.parametrize("python", ["{python}", "/no/such/python", "/bin/false"])
def test_a_profiler_of_our_torchrun_runs_the_user_s(python: str, tmp_path: Path) -> None:
    """`python -m cProfile $(which torchrun)`"""
    shows = "import os, sys; print(sys.argv[1:], 'MT_RESILIENT_WRAPS' in os.environ, os.environ['PATH'])"
    executable(tmp_path / "own" / "torchrun", f"#!/usr/bin/env python3\n{shows}\n")
    environ = environment(WORDS, {"PATH": f"{tmp_path}/own"}) | {handover.PYTHON: python.format(python=sys.executable)}
    environ["PYTHONPATH"] = str(Path(handover.__file__).parents[3])
    command = [sys.executable, "-m", "cProfile", f"{BIN}/torchrun", "x.py"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=30)
    assert done.stdout.startswith(f"['x.py'] False {tmp_path}/own\n"), done.stderr
    assert "function calls" in done.stdout
    assert done.stderr.count("This torchrun runs without mt-resilient\n") == (python != "/no/such/python")


LACKS = "lacks the package mt_resilient here. This torchrun runs without mt-resilient\n"


@pytest.mark.parametrize(
    ("program", "path", "code"),
    [
        ("torchrun", "{bin}:{own}:/usr/bin:/bin", 9),
        ("ssh", "{bin}:{own}:/usr/bin:/bin", 9),
        ("torchrun", "/usr/bin:/bin:{bin}:{bin}", 127),  # there is no other one
    ],
)
def test_a_python_without_the_package_gets_no_torchrun(program: str, path: str, code: int, tmp_path: Path) -> None:
    """In a container, the path of the agent's Python is that of another one."""
    python = executable(tmp_path / "python", "#!/bin/sh\nexit 1\n")
    executable(tmp_path / "own" / program, '#!/bin/sh\necho "$PATH" "$@"; exit 9\n')
    environ = environment(WORDS, {}) | {
        handover.PYTHON: str(python),
        "PATH": path.format(bin=BIN, own=tmp_path / "own"),
    }
    done = subprocess.run([f"{BIN}/{program}", "-V"], env=environ, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (code, f"{tmp_path}/own:/usr/bin:/bin -V\n" if code == 9 else "")
    assert done.stderr.startswith(f"mt-resilient: {python} {LACKS}" if program == "torchrun" else "")


def test_a_module_that_is_torchrun_runs_without_an_agent_whose_python_lacks_the_package(tmp_path: Path) -> None:
    python = executable(tmp_path / "python", "#!/bin/sh\nexit 1\n")
    torchrun = executable(tmp_path / "torchrun", "print('torchrun runs')\n")
    environ = environment(WORDS, {"PATH": "/usr/bin"}) | {handover.PYTHON: str(python)}
    done = subprocess.run([sys.executable, torchrun, "x.py"], env=environ, capture_output=True, text=True, timeout=30)
    assert (done.stdout, done.stderr) == ("torchrun runs\n", f"mt-resilient: {python} {LACKS}")


@pytest.mark.parametrize("path", ["{bin}:/a:/b", "/a:{bin}:/b", "/a:/b:{bin}", "{bin}:/a:{bin}:/b:{bin}"])
def test_the_folder_of_our_programs_is_taken_out_of_path_wherever_it_is(path: str) -> None:
    assert cleaned({"PATH": path.format(bin=BIN)})["PATH"] == "/a:/b"


def test_a_python_that_only_names_torchrun_runs_as_it_is(tmp_path: Path) -> None:
    script = "python3 /no/such/torchrun x.py; echo $?; echo 'print(5)' | python3 - torchrun"
    done = wrapped("--quiet", "--", "bash", "-c", script, place=tmp_path)
    assert done.stdout == "2\n5\n", done.stderr
    handed_over = wrapped(
        "--run-dirs", f"{tmp_path}/runs/", "--", "python3", "/no/such/torchrun", "x.py", place=tmp_path
    )
    assert handed_over.returncode == 2
    assert "mt-resilient" not in handed_over.stderr


@pytest.mark.parametrize(
    ("words", "environ", "why"),
    [
        (["--of-a-newer-torch", "2", "train.py"], {}, "--of-a-newer-torch is no option of torchrun that is known here"),
        (["--nnodes", "2", "train.py"], {}, "several nodes (2) need --etcd"),
        (["train.py"], {"SLURM_JOB_ID": "1", "SLURM_NNODES": "4"}, "Slurm has given this job 4 nodes"),
    ],
)
def test_a_torchrun_of_a_script_that_no_agent_can_run_runs_without_one(
    words: list[str], environ: dict[str, str], why: str, tmp_path: Path
) -> None:
    torchrun = executable(tmp_path / "torchrun", '#!/bin/sh\necho "$@"; exit 9\n')
    (tmp_path / "train.py").touch()
    direct = wrapped("--", torchrun, *words, place=tmp_path, **environ)
    assert (direct.returncode, direct.stdout) == (2, "")
    done = wrapped("--run-dirs", f"{tmp_path}/runs/", "--", torchrun, *words, place=tmp_path, **environ)
    assert (done.returncode, done.stdout) == (9, f"{' '.join(words)}\n")
    assert done.stderr.startswith(f"mt-resilient: {why}")
    assert done.stderr.endswith(". This torchrun runs without mt-resilient\n")
    assert "nothing was started" not in done.stderr


def test_a_torchrun_of_a_script_does_not_begin_anew_if_the_snapshots_are_another_job_s(tmp_path: Path) -> None:
    torchrun = executable(tmp_path / "torchrun", "#!/bin/sh\necho ran\n")
    (tmp_path / "train.py").touch()
    (tmp_path / "kept" / paths.SNAPSHOTS).mkdir(parents=True)
    (tmp_path / "kept" / paths.SNAPSHOTS / paths.JOB).write_text("another")
    places = ["--run-dirs", f"{tmp_path}/runs/", "--snapshots", tmp_path / "kept"]
    done = wrapped(*places, "--", torchrun, "train.py", place=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "are another job's; nothing was started" in done.stderr


def run_of(path: Path, *arguments: str, finished: bool = False, snapshot: bool = False, invocation: str = "") -> Path:
    path.mkdir(parents=True)
    Journal(path / "journal.jsonl").write("start", 0.0, arguments=list(arguments), invocation=invocation)
    if finished:
        (path / "finished").touch()
    if snapshot:
        (attempt := path / paths.SNAPSHOTS / "0000000005-g1-abcdef010000").mkdir(parents=True)
        (attempt / paths.COMMIT).touch()
    return path


def test_a_script_given_again_finds_the_run_directory_of_each_of_its_torchruns(tmp_path: Path) -> None:
    """The first stage is finished, the second one was killed."""
    base = tmp_path / "train"
    assert next_directory(base, ["a"]) == base
    run_of(base, "a", finished=True)
    second = tmp_path / "train.2"
    assert next_directory(base, ["b"]) == second
    run_of(second, "b", snapshot=True)
    third = tmp_path / "train.3"
    assert next_directory(base, ["a"]) == third  # the script does its first stage again, as without us
    run_of(third, "a", finished=True)
    assert next_directory(base, ["b"]) == second
    assert next_directory(base, ["c"]) == second  # refused there, with the difference: its progress may be wanted


def test_the_journals_of_finished_runs_are_not_all_read(tmp_path: Path) -> None:
    """A script that has run a hundred times starts as quickly as the first time."""
    base = run_of(tmp_path / "train", "a", finished=True)
    for ordinal in (2, 3):
        later = run_of(tmp_path / f"train.{ordinal}", "a", finished=True)
        (later / "journal.jsonl").unlink()
        (later / "journal.jsonl").symlink_to("/proc/self/mem")  # reading it is an error
    assert next_directory(base, ["a"]) == tmp_path / "train.4"
    with pytest.raises(OSError, match="Input/output error"):
        next_directory(base, ["b"])


def test_a_run_that_left_no_snapshot_is_not_in_the_way_of_other_arguments(tmp_path: Path) -> None:
    base = run_of(tmp_path / "train", "a")
    assert next_directory(base, ["b"]) == tmp_path / "train.2"
    assert next_directory(base, ["a"]) == base


def test_a_trial_that_ended_badly_is_not_in_the_way_of_the_next_trial_of_its_script(tmp_path: Path) -> None:
    """`for lr in 1 2 3; do torchrun train.py --lr $lr || true; done`"""
    base = tmp_path / "train"
    run_of(base, "--lr", "1", snapshot=True, invocation="5f")
    second = tmp_path / "train.2"
    assert next_directory(base, ["--lr", "2"], invocation="5f") == second
    assert next_directory(base, ["--lr", "2"], invocation="60") == base  # refused there: its progress may be wanted
    assert next_directory(base, ["--lr", "2"]) == base
    run_of(second, "--lr", "2", snapshot=True, invocation="5f")
    assert next_directory(base, ["--lr", "1"], invocation="60") == base
    assert next_directory(base, ["--lr", "2"], invocation="60") == second


@pytest.mark.parametrize(
    ("base", "task", "script", "name"),
    [
        ("mt-runs/", "", "train.py", "mt-runs/train"),
        ("mt-runs/", "", "train_wan2.2_i2v.py", "mt-runs/train_wan2.2_i2v"),
        ("mt-runs/", "", "torchtitan.train", "mt-runs/train"),
        ("mt-runs/", "3", "train.py", "mt-runs/train-task3"),
        ("sweep", "0", "train.py", "sweep-task0"),
    ],
)
def test_trainings_of_several_tasks_have_a_run_directory_each(
    base: str, task: str, script: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    form = "" if script.endswith(".py") else "--module"
    launch = Launch(program=("torchrun",), python="python", options=(), ranks=1, script=(script,), form=form)
    assert default_directory(launch, "", base, (), task) == Path(name)


def test_torchruns_that_start_at_once_take_a_run_directory_each(tmp_path: Path) -> None:
    base = tmp_path / "train"
    said: list[str] = []
    taken = [take_one(lambda busy: next_directory(base, ["a"], "", busy), "", said.append, 0.1) for _ in range(3)]
    assert [whole.name for whole, _ in taken] == ["train", "train.2", "train.3"]
    assert said == []
    with pytest.raises(UsageError, match="another mt-resilient is running"):
        take_one(lambda busy: base, "", said.append)  # the user named it
    for _, run in taken:
        run.release()
    assert next_directory(base, ["a"]) == base


def test_direct_launches_at_once_take_a_run_directory_each_unless_one_command_is_given_twice(tmp_path: Path) -> None:
    """`for fold in 0 1 2; do mt-resilient run -- torchrun train.py --fold $fold & done`"""
    base = tmp_path / "train"

    def taken(*arguments: str, below: str = "") -> RunDirectory:
        choice = take_one(lambda busy: next_directory(base, arguments, below, busy, once=True), below, str)
        return choice[1]

    folds = []
    for fold in range(3):  # each one waits until the one before says what it trains
        folds.append(run := taken("--fold", str(fold)))
        told = partial(Journal(run.journal).write, "start", wall_s(), arguments=["--fold", str(fold)])
        threading.Timer(0.5, told).start()
    assert [run.root.name for run in folds] == ["train", "train.2", "train.3"]
    with pytest.raises(UsageError, match="another mt-resilient is running"):
        taken("--fold", "2")
    with pytest.raises(UsageError, match=r"another mt-resilient is running in .*train\.2;.* --run-dir"):
        taken("--fold", "1")
    for run in folds:
        run.release()
    assert taken("--fold", "1").root.name == "train.2"


def test_a_node_of_several_does_not_leave_the_run_directory_of_the_others(tmp_path: Path) -> None:
    take_one(lambda busy: tmp_path, "nodes/0-a", str)
    with pytest.raises(UsageError, match="another mt-resilient is running"):
        take_one(lambda busy: next_directory(tmp_path, ["a"], "nodes/0-a", busy, once=True), "nodes/0-a", str)


@pytest.mark.parametrize(
    ("exits", "ago_s", "after", "name"),
    [
        (True, 90.0, (), "train"),
        (False, 90.0, (), "train.2"),
        (True, 5.0, (), "train.2"),
        (True, 5.0, ("run",), "train.2"),
        (True, 5.0, ("run", "ending"), "train"),
        (True, 5.0, ("run", "ending", "ended", ""), "train"),
    ],
)
def test_a_torchrun_waits_for_an_agent_whose_job_it_would_continue(
    exits: bool, ago_s: float, after: tuple[str, ...], name: str, tmp_path: Path
) -> None:
    """A script ends its job with pkill and starts it again at once. The old agent is still writing its last snapshot."""
    base = run_of(tmp_path / "train", "a", snapshot=True)
    Journal(base / "journal.jsonl").write("start", wall_s() - ago_s, arguments=["a"])
    for phase in after:
        told: dict[str, Any] = {"record": {"phase": phase}} if phase else {}
        Journal(base / "journal.jsonl").write("generation" if phase else "end", wall_s(), **told)
    (old := RunDirectory(base)).take()
    said: list[str] = []

    def say(sentence: str) -> None:
        said.append(sentence)
        if exits:
            old.release()

    whole, run = take_one(lambda busy: next_directory(base, ["a"], "", busy), "", say, wait_s=60.0 if exits else 0.3)
    assert whole.name == name
    waited = ago_s > 60 or "ending" in after
    assert [sentence.partition(" in ")[0] for sentence in said] == ["another mt-resilient is running"] * waited
    run.release()
    old.release()


def test_bin_is_executable() -> None:
    assert all(os.access(f"{BIN}/{name}", os.X_OK) for name in ("torchrun", "ssh"))
