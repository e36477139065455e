"""The wrapped command: every spelling torchrun takes, and a sentence for each that cannot be kept alive."""

import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mt_resilient.agent.launch import ports
from mt_resilient.agent.launch.ports import free_port, free_ports
from mt_resilient.agent.launch.torchrun import Launch, understand
from mt_resilient.agent.launch.torchrun_options import FLAGS, VALUED
from mt_resilient.resilience.errors import MachineError, UsageError
from mt_resilient.resilience.membership.rank_assignment import sizes

NOBODY: dict[str, str] = {}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a script, and a torchrun of its own on PATH."""
    (tmp_path / "train.py").write_text("")
    program = tmp_path / "bin" / "torchrun"
    program.parent.mkdir()
    program.write_text("#!/opt/venv/bin/python3.11\n")
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(program.parent))
    return tmp_path


def torchrun(*words: str, environ: dict[str, str] = NOBODY) -> Launch:
    return understand(["torchrun", *words], environ)


def refused(*command: str, environ: dict[str, str] = NOBODY) -> str:
    with pytest.raises(UsageError) as caught:
        understand(command, environ)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def knows(found: Launch, **expected: object) -> None:
    assert {name: getattr(found, name) for name in expected} == expected


# -- torchrun's options ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "environ", "ranks"),
    [
        ([], {}, 1),
        (["--nproc_per_node", "4"], {}, 4),
        (["--nproc-per-node", "4"], {}, 4),
        (["--nproc_per_node=4"], {}, 4),
        (["--nproc-per-node=4"], {}, 4),
        (["--nproc-per=4"], {}, 4),
        (["--nnodes", "1", "--nproc-per-node", "4"], {}, 4),
        (["--nnodes=1:1", "--nproc-per-node", "4"], {}, 4),
        (["--nproc-per-node", "2", "--nproc-per-node", "4"], {}, 4),  # the last one counts, as with torchrun
        ([], {"PET_NPROC_PER_NODE": "5", "PET_NNODES": "1"}, 5),
        (["--nproc-per-node=2"], {"PET_NPROC_PER_NODE": "5"}, 2),
    ],
)
def test_every_spelling_of_the_number_of_ranks_is_understood(
    words: list[str], environ: dict[str, str], ranks: int
) -> None:
    understood = torchrun(*words, "train.py", "--lr", "1", "--nnodes", "9", environ=environ)
    knows(understood, ranks=ranks, port=0, options=(), script=("train.py", "--lr", "1", "--nnodes", "9"))


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (["--log-dir", "logs", "-t", "3", "--role=trainer", "--virtual-local-rank", "--local_addr=x"], True),
        (["-t3"], True),
        (["--log-d", "x"], True),
        (["--virtual"], True),
        (["-m"], True),
        (["--module"], True),
        (["--"], True),  # argparse takes the first two dashes of a command away
        (["--standalone"], False),
        (["--nnodes", "1"], False),
        (["--node_rank=0"], False),
        (["--master-addr", "10.0.0.1"], False),
        (["--master_port=29500"], False),
        (["--max-restarts", "3"], False),
        (["--rdzv-backend", "c10d", "--rdzv-endpoint=localhost:0", "--rdzv_id", "7", "--rdzv-conf", "timeout=9"], False),
    ],
)  # fmt: skip
def test_torchrun_gets_its_options_as_they_were_written_except_those_of_the_rendezvous(
    words: list[str], kept: bool
) -> None:
    understood = torchrun("--role", "x", *words, "train.py", "--lr")
    knows(understood, options=("--role", "x", *(words if kept else ())), script=("train.py", "--lr"))


@pytest.mark.parametrize(
    ("words", "environ", "expected"),
    [
        (["train.py"], {}, {"nodes": "", "alone": False, "own_programs": False, "rank_python": ""}),
        (["--nnodes=2:4", "train.py"], {}, {"nodes": "2:4", "alone": False}),
        (["--nnodes=1", "train.py"], {}, {"nodes": "1", "alone": True}),
        (["--standalone", "train.py"], {}, {"nodes": "", "alone": True}),
        (["train.py"], {"PET_STANDALONE": "1"}, {"nodes": "", "alone": True}),
        (["--standalone", "--nnodes", "2", "train.py"], {}, {"nodes": "2", "alone": False}),
        (["--rdzv-endpoint=localhost:0", "train.py"], {}, {"nodes": "", "alone": True}),
        (["--rdzv-endpoint", "127.0.0.1:29400", "train.py"], {}, {"alone": True}),
        (["--rdzv-endpoint=[::1]:29400", "train.py"], {}, {"alone": True}),
        (["--master-addr=localhost", "train.py"], {}, {"alone": True}),
        (["--rdzv-endpoint=localhost:0", "--nnodes=4", "train.py"], {}, {"alone": False}),
        (["--rdzv-endpoint=localhost-4:0", "train.py"], {}, {"alone": False}),
        (
            ["--rdzv-endpoint=gpu-01:29400", "--rdzv-backend=c10d", "train.py"],
            {},
            {"alone": False, "rdzv_backend": "c10d"},
        ),
        (["train.py"], {"PET_NNODES": "2"}, {"nodes": "2"}),
        (["--master-port=29511", "train.py"], {}, {"port": 29511, "timeout_s": 0}),
        (["--rdzv-conf", "rank=0,timeout=1800", "train.py"], {}, {"timeout_s": 1800}),
        (["--rdzv-conf=join_timeout=60", "train.py"], {}, {"timeout_s": 0}),
        (["train.py"], {"PET_MASTER_PORT": "29511"}, {"port": 29511}),
        (
            ["-m", "package.train"],
            {},
            {"script": ("package.train",)},
        ),  # neither a module nor a program needs a file here
        (["--no-python", "bash", "-c", "true"], {}, {"script": ("bash", "-c", "true"), "own_programs": True}),
    ],
)
def test_further_facts_that_a_command_gives(
    words: list[str], environ: dict[str, str], expected: dict[str, object]
) -> None:
    knows(torchrun(*words, environ=environ), **expected)


@pytest.mark.parametrize(
    ("words", "environ", "why"),
    [
        (["--no-python", "wrapper.sh"], {}, "ranks are started by wrapper.sh"),
        (["wrapper.sh"], {"PET_NO_PYTHON": "1"}, "ranks are started by wrapper.sh"),
        (["--run-path", "train.py"], {}, "ranks are started by train.py"),
        (["train.py"], {"PYTHON_EXEC": "/opt/bin/python"}, "PYTHON_EXEC names /opt/bin/python"),
    ],
)
def test_why_ranks_of_another_program_cannot_be_forked(words: list[str], environ: dict[str, str], why: str) -> None:
    understood = torchrun(*words, environ=environ)
    assert why in understood.warm_refused
    knows(understood, own_programs="PYTHON_EXEC" not in environ, rank_python=environ.get("PYTHON_EXEC", ""))


def test_a_requested_port_is_used_while_it_is_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        assert free_port("127.0.0.1", wished=taken) != taken
    assert free_port("127.0.0.1", wished=taken) == taken


def test_several_ports_are_different_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """A port that nothing listens on yet may be drawn twice."""
    drawn = iter((7, 7, 7, 8))
    monkeypatch.setattr(ports, "free_port", lambda host: next(drawn))
    assert sorted(free_ports(2)) == [7, 8]


def test_variables_of_the_rendezvous_do_not_reach_the_launcher_but_the_ranks() -> None:
    """The training operator sets them for a PyTorchJob with an elasticPolicy."""
    others = {"PET_MONITOR_INTERVAL": "1", "MASTER_ADDR": "x"}
    names = ("BACKEND", "ENDPOINT", "ID", "CONF")
    decided = {f"PET_RDZV_{name}": "gpt" for name in names} | {"PET_MASTER_ADDR": "x"}
    decided |= {f"PET_{name}": "3" for name in ("STANDALONE", "NODE_RANK", "MASTER_PORT", "MAX_RESTARTS")}
    understood = torchrun("train.py", environ=decided | others)
    assert understood.environment(decided | others).keys() == {"PYTHONPATH", *others}
    assert understood.told_to_ranks(decided | others) == decided | {"TORCHELASTIC_MAX_RESTARTS": "3"}
    assert torchrun("--max-restarts=2", "train.py").told_to_ranks({}) == {"TORCHELASTIC_MAX_RESTARTS": "2"}
    assert torchrun("train.py").told_to_ranks({}) == {}


def test_the_warm_process_does_not_get_a_rank_that_the_agent_s_own_environment_has() -> None:
    """From a Kubernetes operator, or a torchrun around the agent. A wrapper may read it at the start."""
    ranks = dict.fromkeys(("RANK", "WORLD_SIZE", "MASTER_ADDR"), "7")
    given = {**ranks, "TORCHELASTIC_RUN_ID": "outer", "HOME": "/home"}
    found = torchrun("train.py")
    assert found.environment(given).keys() == {"PYTHONPATH", "HOME", *ranks}
    assert found.shared_environment(given).keys() == {"PYTHONPATH", "HOME"}


def test_torchrun_s_arguments_for_a_generation() -> None:
    understood = torchrun("--standalone", "--nproc_per_node", "gpu", "--role=trainer", "train.py", "--lr", "1")
    knows(understood, ranks=0, counts="gpu")
    understood = replace(understood, ranks=2)
    meeting = {"nodes": 3, "node_rank": 1, "master_addr": "10.0.0.1", "master_port": 12345, "run": "1f"}
    first = ["--nnodes=3", "--node-rank=1", "--master-addr=10.0.0.1", "--master-port=12345", "--max-restarts=0"]
    # Two ranks: the number that was counted.
    rest = ["--nproc-per-node=2", "--rdzv-id=1f", "--role=trainer", "train.py", "--lr", "1"]
    assert understood.arguments(**meeting) == [*first, *rest]
    assert "--rdzv-id=gpt" in torchrun("--rdzv_id", "gpt", "train.py").arguments(**meeting)


@pytest.mark.parametrize(
    ("words", "torn"),
    [
        ((), 0),
        (("--tensor-model-parallel-size", "4"), 0),
        (("--tensor-model-parallel-size=2", "--pipeline-model-parallel-size", "8"), 0),
        (("--tensor-model-parallel-size", "8"), 8),
        (("--tensor-model-parallel-size=3",), 3),
        (("--tensor-model-parallel-size", "8", "--tensor-model-parallel-size", "2"), 0),
        (("--tensor-model-parallel-size=8", "--tensor-model-parallel-size", "2"), 0),
        (("--tensor-model-parallel-size",), 0),
        (("--tensor-model-parallel-size", "0"), 0),
    ],
)
def test_tensor_parallel_groups_that_span_two_nodes_are_found(words: tuple[str, ...], torn: int) -> None:
    assert torchrun("--nproc-per-node", "4", "train.py", *words).torn_groups == torn


def test_the_arguments_are_understood_as_the_same_launch() -> None:
    once = torchrun("--nproc-per-node", "2", "-m", "package.train", "--lr", "1")
    again = torchrun(*once.arguments(nodes=1, node_rank=0, master_addr="x", master_port=1, run="1f"))
    assert again == replace(once, nodes="1", alone=True, port=1, rdzv_id="1f", master="x", node_rank="0")


@pytest.mark.parametrize(
    "words",
    [
        ["train.py", "--", "--lr", "1"],
        ["train.py", "--", "--", "1"],
        ["--", "train.py", "--", "1"],
        ["train.py", "--lr", "--", "1"],
        ["train.py", "--"],
    ],
)
def test_dashes_behind_the_script_reach_the_ranks_as_under_torchrun(words: list[str]) -> None:
    """Ranks are forked only if their command is the one that torchrun gives them."""
    run = pytest.importorskip("torch.distributed.run")
    parsed = run.get_args_parser().parse_args(words)
    found = torchrun(*words)
    assert found.script == (parsed.training_script, *parsed.training_script_args)
    again = run.get_args_parser().parse_args([*found.options, *found.script])
    assert found.script == (again.training_script, *again.training_script_args)


@pytest.mark.parametrize(
    ("words", "environ", "names"),
    [
        (["--nnodes="], {}, "--nnodes is ''"),
        (["--nproc_per_node="], {}, "--nproc-per-node is ''"),
        (["--nproc_per_node", " "], {}, "--nproc-per-node is ''"),
        (["--node-rank="], {"PET_NODE_RANK": "1"}, "--node-rank is ''"),
        (["--master-port=x"], {}, "--master-port is 'x'"),
        (["--max-restarts="], {}, "--max-restarts is ''"),
        ([], {"PET_NNODES": ""}, "--nnodes is ''"),
        ([], {"PET_MASTER_PORT": ""}, "--master-port is ''"),
    ],
)
def test_a_number_that_torchrun_refuses_is_refused(words: list[str], environ: dict[str, str], names: str) -> None:
    """`--nnodes=$UNSET`"""
    assert names in refused("torchrun", *words, "train.py", environ=environ)


def test_a_script_may_be_a_folder_that_python_can_run(place: Path) -> None:
    (place / "package").mkdir()
    (place / "package" / "__main__.py").write_text("")
    understood = understand([sys.executable, "-m", "torch.distributed.run", "package"], NOBODY)
    assert understood.rank_command == (sys.executable, "-u", "package")


def test_ranks_with_the_hook_hash_strings_alike_in_all_generations() -> None:
    launch = replace(torchrun("train.py"), hash_seed=7)
    assert not replace(launch, hooked=False).environment(NOBODY)
    assert launch.environment(NOBODY)["PYTHONHASHSEED"] == "7"
    assert launch.environment({"PYTHONHASHSEED": "random"})["PYTHONHASHSEED"] == "random"


# -- which interpreter -----------------------------------------------------------------------------------------------------


def test_the_interpreter_is_the_one_that_torchrun_s_first_line_names(place: Path) -> None:
    assert torchrun("train.py").program == (str(place / "bin" / "torchrun"),)
    assert torchrun("train.py").python == "/opt/venv/bin/python3.11"


@pytest.mark.parametrize("first_line", ["#!/bin/sh\n", "\x7fELF", ""])
def test_a_torchrun_that_names_no_interpreter_gets_ours_and_forks_no_ranks(place: Path, first_line: str) -> None:
    (place / "bin" / "torchrun").write_text(first_line)
    assert torchrun("train.py").python == sys.executable
    assert torchrun("train.py").interpreter == ()
    assert "not torch's own torchrun" in torchrun("train.py").warm_refused


PIP = """
# -*- coding: utf-8 -*-
import re
import sys
from torch.distributed.run import main
if __name__ == '__main__':
    sys.argv[0] = re.sub(r'(-script\\.pyw|\\.exe)?$', '', sys.argv[0])
    sys.exit(main())
"""
UV = """
# -*- coding: utf-8 -*-
import sys
from torch.distributed.run import main
if __name__ == "__main__":
    if sys.argv[0].endswith("-script.pyw"):
        sys.argv[0] = sys.argv[0][:-11]
    elif sys.argv[0].endswith(".exe"):
        sys.argv[0] = sys.argv[0][:-4]
    sys.exit(main())
"""
SETS = """
import os
from torch.distributed.run import main
os.environ["NCCL_DEBUG"] = "INFO"
main()
"""
LONG = f"#!/bin/sh\n'''exec' \"{sys.executable}\" \"$0\" \"$@\"\n' '''"


@pytest.mark.parametrize(
    ("first_line", "body", "options"),
    [
        (f"#!{sys.executable}", PIP, ()),
        (f"#!{sys.executable}", UV, ()),
        (f"#!/usr/bin/env -S {sys.executable} -X utf8 -s", PIP, ("-X", "utf8", "-s")),
        (f"#!{sys.executable} -s", UV, ("-s",)),
        (LONG, PIP, ()),
    ],
)
def test_ranks_may_be_forked_if_torchrun_is_torch_s_own_entry_point(
    place: Path, first_line: str, body: str, options: tuple[str, ...]
) -> None:
    (place / "bin" / "torchrun").write_text(first_line + body)
    understood = torchrun("train.py")
    assert understood.warm_refused == ""
    assert understood.interpreter == (sys.executable, *options)


@pytest.mark.parametrize(
    "source",
    [
        f'#!/bin/sh\nexport NCCL_DEBUG=INFO\nexec {sys.executable} -m torch.distributed.run "$@"\n',
        f"#!{sys.executable}{SETS}",
        f"#!{sys.executable}\nimport site_setup{PIP}",
        f"#!{sys.executable}\nthis is no Python\n",
    ],
)
def test_ranks_of_a_wrapper_are_not_forked(place: Path, source: str) -> None:
    (place / "bin" / "torchrun").write_text(source)
    assert "torchrun is not torch's own torchrun, and may set what ranks need" in torchrun("train.py").warm_refused


def test_ranks_of_a_python_that_is_a_script_are_not_forked(place: Path) -> None:
    shim = place / "bin" / "python"
    shim.write_text(f'#!/bin/sh\nexport NCCL_DEBUG=INFO\nexec {sys.executable} "$@"\n')
    shim.chmod(0o755)
    understood = understand(["python", "-m", "torch.distributed.run", "train.py"], NOBODY)
    assert understood.interpreter == ("python",)
    assert f"{shim} is a script" in understood.warm_refused


def test_a_python_may_run_torchrun_s_file(place: Path) -> None:
    path = place / "bin" / "torchrun"
    path.write_text("#!/nowhere/python" + PIP)
    understood = understand([sys.executable, "-s", str(path), "train.py"], NOBODY)
    assert understood.program == (sys.executable, "-s", str(path))
    assert (understood.python, understood.script) == (sys.executable, ("train.py",))
    assert not understood.warm_refused


RUN, LAUNCH = "torch.distributed.run", "torch.distributed.launch"


@pytest.mark.parametrize(
    ("words", "options", "module"),
    [
        (["-m", RUN], [], RUN),
        ([f"-m{RUN}"], [], RUN),
        (["-m", LAUNCH, "--use-env"], [], RUN),
        # `--local-rank=N`, which scripts from before torchrun want
        (["-m", LAUNCH], [], LAUNCH),
        (["-um", RUN], ["-u"], RUN),
        (["-u", "-m", RUN], ["-u"], RUN),
        (["-X", "importtime", "-m", RUN], ["-X", "importtime"], RUN),
        (["-Ximporttime", "-W", "ignore", "-Wonce::UserWarning", "-m", RUN], None, RUN),
        (["-sEB", "-m", RUN], None, RUN),
        (["-I", "-OO", "--check-hash-based-pycs", "never", "-m", RUN], None, RUN),
    ],
)
def test_a_python_that_runs_torchrun_s_module_keeps_its_own_options(
    words: list[str], options: list[str] | None, module: str
) -> None:
    interpreter = (sys.executable, *(words[:-2] if options is None else options))
    understood = understand([sys.executable, *words, "--nproc_per_node=2", "train.py"], NOBODY)
    knows(understood, python=sys.executable, ranks=2, options=(), script=("train.py",), interpreter=interpreter)
    assert understood.program == (*interpreter, "-m", module)
    # torchrun gives its ranks none of Python's options.
    assert understood.warm_refused == (f"{LAUNCH} gives each rank an argument of its own" if module == LAUNCH else "")


def test_a_python_is_looked_for_on_path(place: Path) -> None:
    found = place / "bin" / "python3"
    found.write_text("")
    found.chmod(0o755)
    for name, python in (("python3", str(found)), ("python9", "python9")):
        assert understand([name, "-m", "torch.distributed.run", "train.py"], NOBODY).python == python


def test_a_torchrun_named_by_its_path(place: Path) -> None:
    path = str(place / "bin" / "torchrun")
    assert understand([path, "train.py"], NOBODY).program == (path,)


def test_a_torchrun_that_is_not_installed_is_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(place))
    monkeypatch.setattr(sys, "executable", str(place / "python"))
    with pytest.raises(MachineError, match="torchrun was not found on PATH"):
        torchrun("train.py")
    with pytest.raises(MachineError, match="/nowhere/torchrun was not found"):
        understand(["/nowhere/torchrun", "train.py"], NOBODY)


def test_the_torchrun_beside_our_own_interpreter_is_found(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(place))
    monkeypatch.setattr(sys, "executable", str(place / "bin" / "python"))
    assert torchrun("train.py").program == (str(place / "bin" / "torchrun"),)


# -- what cannot be kept alive ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ([], "no command was given"),
        (["python", "train.py"], "python is not torchrun"),
        (["python", "-m", "torch.distributed"], "python is not torchrun"),
        (["bash", "run.sh"], "bash is not torchrun"),
        (["python", "-c", "1", "-m", "torch.distributed.run"], "python is not torchrun"),
        (["python", "-X"], "python is not torchrun"),
        (["env", "A=1", "torchrun", "train.py"], "in front of torchrun: env A=1 mt-resilient run -- torchrun …"),
        (
            ["srun", "-N2", "/opt/bin/torchrun", "x.py"],
            "in front of torchrun: srun -N2 mt-resilient run -- /opt/bin/torchrun …",
        ),
        (["torchrun"], "names no script"),
        (["torchrun", "--nproc-per-node", "2"], "names no script"),
        (["torchrun", "missing.py"], "the script missing.py is not there"),
        (["torchrun", "bin"], "the script bin is not there"),
        (["torchrun", "x" * 5000], "is not there"),
        (["torchrun", "--nproc-per-node"], "option --nproc-per-node needs a value"),
        (["torchrun", "--lr", "1", "train.py"], "--lr is no option of torchrun"),
        (["torchrun", "--nproc-per-node", "2x", "train.py"], "--nproc-per-node 2x: give the number"),
        (["torchrun", "--nproc-per-node", "0", "train.py"], "--nproc-per-node 0: give the number"),
        (["torchrun", "--nproc-per-node", "-1", "train.py"], "--nproc-per-node -1: give the number"),
    ],
)
def test_a_command_that_is_no_torchrun_is_refused_with_one_sentence(command: list[str], sentence: str) -> None:
    assert sentence in refused(*command)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("1", (1,)), ("4", (4,)), ("1:1", (1,)), ("2:4", (2, 3, 4)), ("8,2,4", (2, 4, 8)), ("2,2", (2,))],
)
def test_numbers_of_nodes_are_sorted_and_complete(text: str, numbers: tuple[int, ...]) -> None:
    assert sizes(text) == numbers


@pytest.mark.parametrize("text", ["", "0", "4:2", "2:", "-1", "two", "1:2:3", "2;4", "2,"])
def test_other_texts_for_the_number_of_nodes_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--nodes"):
        sizes(text)


def test_all_options_of_the_installed_torchrun_are_known() -> None:
    run = pytest.importorskip("torch.distributed.run")
    for action in run.get_args_parser()._actions:
        for option in set(action.option_strings) - {"-h", "--help"}:
            name = option.lstrip("-").replace("-", "_")
            assert name in (FLAGS if action.nargs == 0 else VALUED), option
