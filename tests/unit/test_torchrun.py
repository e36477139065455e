"""The wrapped command: every spelling torchrun takes, and a sentence for each that cannot be kept alive."""

import os
import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mt_resilient.agent.launch import torchrun as launch
from mt_resilient.agent.launch.ports import free_port
from mt_resilient.agent.launch.torchrun import Launch, understand
from mt_resilient.resilience.errors import MachineError, UsageError
from mt_resilient.resilience.membership.rank_assignment import sizes

NOBODY: dict[str, str] = {}
GPUS = {"CUDA_VISIBLE_DEVICES": "4,5"}


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


# -- what it says ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ["--nproc_per_node", "4"],
        ["--nproc-per-node", "4"],
        ["--nproc_per_node=4"],
        ["--nproc-per-node=4"],
        ["--nnodes", "1", "--nproc-per-node", "4"],
        ["--nnodes=1:1", "--nproc-per-node", "4"],
        ["--nproc-per-node", "2", "--nproc-per-node", "4"],  # the last one counts, as with torchrun
    ],
)
def test_spellings(words: list[str]) -> None:
    understood = torchrun(*words, "train.py", "--lr", "1", "--nnodes", "9")
    assert understood.ranks == 4
    assert understood.port == 0
    assert understood.script == ("train.py", "--lr", "1", "--nnodes", "9")


def test_a_port_that_the_script_may_know_is_kept_while_it_is_free() -> None:
    assert torchrun("--master-port=29511", "train.py").port == 29511
    assert torchrun("train.py", environ={"PET_MASTER_PORT": "29511"}).port == 29511
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        assert free_port("127.0.0.1", wished=taken) != taken
    assert free_port("127.0.0.1", wished=taken) == taken


def test_what_keeps_its_meaning_is_passed_on_as_it_was_written() -> None:
    kept = ["--log-dir", "logs", "-t", "3", "--role=trainer", "--virtual-local-rank", "--local_addr=x"]
    assert torchrun(*kept, "train.py").options == tuple(kept)


@pytest.mark.parametrize(
    "words",
    [
        ["--standalone"],
        ["--nproc_per_node=2"],
        ["--nnodes", "1"],
        ["--node_rank=0"],
        ["--master-addr", "10.0.0.1"],
        ["--master_port=29500"],
        ["--max-restarts", "3"],
        ["--rdzv-backend", "c10d", "--rdzv-endpoint=localhost:0", "--rdzv_id", "7", "--rdzv-conf", "timeout=9"],
    ],
)
def test_how_many_meet_whom_and_how_is_ours_to_say(words: list[str]) -> None:
    understood = torchrun(*words, "--role", "trainer", "train.py")
    assert understood.options == ("--role", "trainer")
    assert understood.script == ("train.py",)


def test_nor_do_variables_of_torchrun_s_say_it() -> None:
    """As the training operator sets them for a PyTorchJob with an elasticPolicy."""
    others = {"PET_MONITOR_INTERVAL": "1", "MASTER_ADDR": "x"}
    decided = {
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": "gpt-worker-0:23456",
        "PET_RDZV_ID": "gpt",
        "PET_RDZV_CONF": "timeout=9",
    }
    decided |= {
        "PET_STANDALONE": "1",
        "PET_NODE_RANK": "3",
        "PET_MASTER_ADDR": "x",
        "PET_MASTER_PORT": "1",
        "PET_MAX_RESTARTS": "3",
    }
    understood = torchrun("train.py", environ=decided | others)
    assert understood.environment(decided | others).keys() == {"PYTHONPATH", *others}
    assert understood.told_to_ranks(decided | others) == decided | {"TORCHELASTIC_MAX_RESTARTS": "3"}, (
        "as under torchrun"
    )
    assert torchrun("--max-restarts=2", "train.py").told_to_ranks({}) == {"TORCHELASTIC_MAX_RESTARTS": "2"}
    assert torchrun("train.py").told_to_ranks({}) == {}


def test_a_rank_that_somebody_else_has_given_the_agent_is_no_rank_of_ours() -> None:
    """A Kubernetes operator, or a torchrun around the agent: a wrapper may read it at the start, what is imported ahead must not."""
    given = {
        "RANK": "7",
        "WORLD_SIZE": "9",
        "MASTER_ADDR": "elsewhere",
        "TORCHELASTIC_RUN_ID": "outer",
        "HOME": "/home",
    }
    found = torchrun("train.py")
    assert found.environment(given).keys() == {"PYTHONPATH", "RANK", "WORLD_SIZE", "MASTER_ADDR", "HOME"}
    assert found.shared_environment(given).keys() == {"PYTHONPATH", "HOME"}


def test_arguments_of_a_generation() -> None:
    understood = torchrun(
        "--standalone", "--nproc_per_node", "gpu", "--role=trainer", "train.py", "--lr", "1", environ=GPUS
    )
    assert understood.arguments(nodes=3, node_rank=1, master_addr="10.0.0.1", master_port=12345, run="1f") == [
        "--nnodes=3",
        "--node-rank=1",
        "--master-addr=10.0.0.1",
        "--master-port=12345",
        "--max-restarts=0",
        "--nproc-per-node=2",  # the number that was understood, whatever it was spelled as
        "--rdzv-id=1f",
        "--role=trainer",
        "train.py",
        "--lr",
        "1",
    ]


@pytest.mark.parametrize(
    ("words", "torn"),
    [
        ((), 0),
        (("--tensor-model-parallel-size", "4"), 0),
        (("--tensor-model-parallel-size=2", "--pipeline-model-parallel-size", "8"), 0),
        (("--tensor-model-parallel-size", "8"), 8),
        (("--tensor-model-parallel-size=3",), 3),
        (("--tensor-model-parallel-size", "8", "--tensor-model-parallel-size", "2"), 0),
        (("--tensor-model-parallel-size",), 0),
        (("--tensor-model-parallel-size", "0"), 0),
    ],
)
def test_tensor_parallel_groups_that_lie_on_two_nodes(words: tuple[str, ...], torn: int) -> None:
    assert torchrun("--nproc-per-node", "4", "train.py", *words).torn_groups == torn


def test_what_goes_in_comes_out_the_same_when_understood_again() -> None:
    once = torchrun("--nproc-per-node", "2", "-m", "package.train", "--lr", "1")
    again = torchrun(*once.arguments(nodes=1, node_rank=0, master_addr="x", master_port=1, run="1f"))
    assert again == replace(once, nodes="1", port=1, rdzv_id="1f")


def test_ranks_find_the_id_that_torchrun_was_given() -> None:
    arguments = torchrun("--rdzv_id", "gpt", "train.py").arguments(
        nodes=1, node_rank=0, master_addr="x", master_port=1, run="1f"
    )
    assert "--rdzv-id=gpt" in arguments


@pytest.mark.parametrize("flag", ["-m", "--module"])
def test_a_module_need_not_be_a_file(flag: str) -> None:
    understood = torchrun(flag, "package.train", "--lr", "1")
    assert (understood.options, understood.script) == ((flag,), ("package.train", "--lr", "1"))


def test_a_program_need_not_be_a_file_here() -> None:
    assert torchrun("--no-python", "bash", "-c", "true").script == ("bash", "-c", "true")


def test_two_dashes_end_the_options() -> None:
    understood = torchrun("--nproc-per-node=2", "--", "train.py", "--lr")
    assert understood.script == ("train.py", "--lr")
    assert understood.options == ("--",)  # argparse takes the first ones of a command away


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (["-t3"], ("-t3",)),
        (["--log-d", "x"], ("--log-d", "x")),
        (["--nproc-per=4"], ()),
        (["--virtual"], ("--virtual",)),
    ],
)
def test_options_that_argparse_takes_in_short(words: list[str], kept: tuple[str, ...]) -> None:
    understood = torchrun(*words, "train.py")
    assert (understood.options, understood.script) == (kept, ("train.py",))


@pytest.mark.parametrize(
    ("words", "environ"),
    [
        (["--no-python", "wrapper.sh"], NOBODY),
        (["wrapper.sh"], {"PET_NO_PYTHON": "1"}),
        (["--run-path", "train.py"], NOBODY),
    ],
)
def test_ranks_that_torchrun_starts_no_python_for(words: list[str], environ: dict[str, str]) -> None:
    understood = torchrun(*words, environ=environ)
    assert understood.own_programs
    assert f"ranks are started by {words[-1]}" in understood.warm_refused


def test_another_python_for_the_ranks() -> None:
    understood = torchrun("train.py", environ={"PYTHON_EXEC": "/opt/other/bin/python"})
    assert understood.rank_python == "/opt/other/bin/python"
    assert "PYTHON_EXEC names /opt/other/bin/python" in understood.warm_refused


def test_a_folder_that_python_can_run(place: Path) -> None:
    (place / "package").mkdir()
    (place / "package" / "__main__.py").write_text("")
    understood = understand([sys.executable, "-m", "torch.distributed.run", "package"], NOBODY)
    assert understood.rank_command == (sys.executable, "-u", "package")


def test_a_name_that_is_too_long() -> None:
    assert "is not there" in refused("torchrun", "x" * 5000)


def test_ranks_without_our_hook() -> None:
    assert not replace(torchrun("train.py"), hooked=False, hash_seed=7).environment(NOBODY)


def test_strings_are_hashed_alike_in_all_lives_of_a_job() -> None:
    launch = replace(torchrun("train.py"), hash_seed=7)
    assert launch.environment(NOBODY)["PYTHONHASHSEED"] == "7"
    assert launch.environment({"PYTHONHASHSEED": "random"})["PYTHONHASHSEED"] == "random"


# -- how many ranks --------------------------------------------------------------------------------------------------------


def test_one_rank_where_nothing_is_said() -> None:
    assert torchrun("train.py").ranks == 1


@pytest.mark.parametrize(
    ("text", "environ", "ranks"),
    [
        ("3", {}, 3),
        ("gpu", {"CUDA_VISIBLE_DEVICES": "0,2,3"}, 3),
        ("gpu", {"MUSA_VISIBLE_DEVICES": "0,1", "CUDA_VISIBLE_DEVICES": "0,2,3"}, 2),
        ("auto", {"MUSA_VISIBLE_DEVICES": "5"}, 1),
        ("cpu", {}, os.cpu_count()),
    ],
)
def test_ranks_by_devices(text: str, environ: dict[str, str], ranks: int) -> None:
    assert torchrun("--nproc-per-node", text, "train.py", environ=environ).ranks == ranks


def test_torchrun_s_own_environment_counts_where_no_option_does() -> None:
    environ = {"PET_NPROC_PER_NODE": "5", "PET_NNODES": "1"}
    assert torchrun("train.py", environ=environ).ranks == 5
    assert torchrun("--nproc-per-node=2", "train.py", environ=environ).ranks == 2


# -- which interpreter -----------------------------------------------------------------------------------------------------


def test_the_interpreter_is_the_one_that_torchrun_names(place: Path) -> None:
    assert torchrun("train.py").program == (str(place / "bin" / "torchrun"),)
    assert torchrun("train.py").python == "/opt/venv/bin/python3.11"


@pytest.mark.parametrize("first_line", ["#!/bin/sh\n", "\x7fELF", ""])
def test_where_it_names_none_ours_is_taken(place: Path, first_line: str) -> None:
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
def test_torch_s_own_entry_point_may_be_left_out(
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
def test_a_wrapper_may_set_what_ranks_need(place: Path, source: str) -> None:
    (place / "bin" / "torchrun").write_text(source)
    assert "torchrun is not torch's own torchrun, and may set what ranks need" in torchrun("train.py").warm_refused


def test_so_may_a_python_that_is_a_script(place: Path) -> None:
    shim = place / "bin" / "python"
    shim.write_text(f'#!/bin/sh\nexport NCCL_DEBUG=INFO\nexec {sys.executable} "$@"\n')
    shim.chmod(0o755)
    understood = understand(["python", "-m", "torch.distributed.run", "train.py"], NOBODY)
    assert understood.interpreter == ("python",)
    assert f"{shim} is a script" in understood.warm_refused


def test_a_python_that_runs_torchrun_s_file(place: Path) -> None:
    path = place / "bin" / "torchrun"
    path.write_text("#!/nowhere/python" + PIP)
    understood = understand([sys.executable, "-s", str(path), "train.py"], NOBODY)
    assert understood.program == (sys.executable, "-s", str(path))
    assert (understood.python, understood.script) == (sys.executable, ("train.py",))
    assert not understood.warm_refused


@pytest.mark.parametrize(
    "command",
    [
        [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "train.py"],
        [sys.executable, "-mtorch.distributed.run", "--nproc_per_node=2", "train.py"],
        [sys.executable, "-m", "torch.distributed.launch", "--nproc_per_node=2", "--use-env", "train.py"],
    ],
)
def test_a_python_that_runs_the_module(command: list[str]) -> None:
    understood = understand(command, NOBODY)
    assert understood.program == (sys.executable, "-m", "torch.distributed.run")
    assert (understood.python, understood.ranks, understood.script) == (sys.executable, 2, ("train.py",))
    assert understood.options == ()
    assert not understood.warm_refused


def test_launch_gives_ranks_an_argument_that_run_does_not() -> None:
    """`--local-rank=N`, which scripts from before torchrun want."""
    understood = understand([sys.executable, "-m", "torch.distributed.launch", "train.py"], NOBODY)
    assert understood.program == (sys.executable, "-m", "torch.distributed.launch")
    assert "an argument of its own" in understood.warm_refused


@pytest.mark.parametrize(
    "options",
    [
        ["-u"],
        ["-X", "importtime"],
        ["-Ximporttime", "-W", "ignore", "-Wonce::UserWarning"],
        ["-sEB"],
        ["-I", "-OO", "--check-hash-based-pycs", "never"],
    ],
)
def test_options_of_python_stay_with_the_launcher(options: list[str]) -> None:
    understood = understand([sys.executable, *options, "-m", "torch.distributed.run", "train.py"], NOBODY)
    assert understood.program == (sys.executable, *options, "-m", "torch.distributed.run")
    assert understood.interpreter == (sys.executable, *options)
    assert not understood.warm_refused  # torchrun gives its ranks none of them


def test_options_of_python_in_one_word_with_its_module() -> None:
    understood = understand([sys.executable, "-um", "torch.distributed.run", "train.py"], NOBODY)
    assert understood.program == (sys.executable, "-u", "-m", "torch.distributed.run")


def test_a_python_is_looked_for_on_path(place: Path) -> None:
    found = place / "bin" / "python3"
    found.write_text("")
    found.chmod(0o755)
    for name, python in (("python3", str(found)), ("python9", "python9")):
        assert understand([name, "-m", "torch.distributed.run", "train.py"], NOBODY).python == python


def test_a_torchrun_named_by_its_path(place: Path) -> None:
    path = str(place / "bin" / "torchrun")
    assert understand([path, "train.py"], NOBODY).program == (path,)


def test_no_torchrun_on_path(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        (["python", "train.py"], "python is no torchrun"),
        (["python", "-m", "torch.distributed"], "python is no torchrun"),
        (["bash", "run.sh"], "bash is no torchrun"),
        (["python", "-c", "1", "-m", "torch.distributed.run"], "python is no torchrun"),
        (["python", "-X"], "python is no torchrun"),
        (["env", "A=1", "torchrun", "train.py"], "in front of that: env A=1 mt-resilient run -- torchrun …"),
        (
            ["srun", "-N2", "/opt/bin/torchrun", "x.py"],
            "in front of that: srun -N2 mt-resilient run -- /opt/bin/torchrun …",
        ),
        (["torchrun"], "names no script"),
        (["torchrun", "--nproc-per-node", "2"], "names no script"),
        (["torchrun", "missing.py"], "the script missing.py is not there"),
        (["torchrun", "bin"], "the script bin is not there"),
        (["torchrun", "--nproc-per-node"], "option --nproc-per-node wants a value"),
        (["torchrun", "--lr", "1", "train.py"], "--lr is no option of torchrun"),
        (["torchrun", "--nproc-per-node", "many", "train.py"], "--nproc-per-node many: give the number"),
        (["torchrun", "--nproc-per-node", "0", "train.py"], "--nproc-per-node 0: give the number"),
        (["torchrun", "--nproc-per-node", "-1", "train.py"], "--nproc-per-node -1: give the number"),
    ],
)
def test_refused_with_a_sentence(command: list[str], sentence: str) -> None:
    assert sentence in refused(*command)


def test_what_it_says_about_the_number_of_nodes() -> None:
    assert torchrun("train.py").nodes == ""
    assert torchrun("--nnodes=2:4", "train.py").nodes == "2:4"
    assert understand(["torchrun", "train.py"], {"PET_NNODES": "2"}).nodes == "2"


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("1", (1,)), ("4", (4,)), ("1:1", (1,)), ("2:4", (2, 3, 4)), ("8,2,4", (2, 4, 8)), ("2,2", (2,))],
)
def test_numbers_of_nodes(text: str, numbers: tuple[int, ...]) -> None:
    assert sizes(text) == numbers


@pytest.mark.parametrize("text", ["", "0", "4:2", "2:", "-1", "two", "1:2:3", "2;4", "2,"])
def test_what_is_no_number_of_nodes(text: str) -> None:
    with pytest.raises(UsageError, match="--nodes"):
        sizes(text)


def test_all_options_of_the_installed_torchrun_are_known() -> None:
    run = pytest.importorskip("torch.distributed.run")
    for action in run.get_args_parser()._actions:
        for option in set(action.option_strings) - {"-h", "--help"}:
            name = option.lstrip("-").replace("-", "_")
            assert name in (launch._FLAGS if action.nargs == 0 else launch._VALUED), option
