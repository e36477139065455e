"""What `run --dry-run` prints of each form of launch."""

import os
import socket
import sys
from pathlib import Path

import pytest

from mt_resilient import cli
from mt_resilient.agent.join.dry_run import unwatched
from mt_resilient.agent.run_directory import RunDirectory
from mt_resilient.resilience.report.journal import Journal
from mt_resilient.resilience.store.etcd.access import Papers

BIN = Path(sys.executable).parent
MEGATRON = "from megatron.training import pretrain\n"
ARGUMENTS = ["--tensor-model-parallel-size", "2", "--global-batch-size=64", "--save", "/ck"]
SLURM = {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "gpu-17", "SLURM_STEP_NUM_NODES": "4", "SLURM_STEP_ID": "0"}
KUBERNETES = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
SHARED = ["--etcd", "etcd:2379", "--snapshots", "/shared"]
OUTER = """
# torchrun in a comment
for host in $(cat hostfile); do
  ssh -f -n $host "cd $PWD; bash inner.sh $host &"
done
"""
INNER = """
pkill -f /opt/bin/torchrun
export PATH=/opt/bin
export PYTHONPATH=/megatron:$PYTHONPATH
cmd="torchrun ${ARGS[@]} pretrain_gpt.py"
eval $cmd
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "pretrain_gpt.py").write_text(MEGATRON)
    (tmp_path / "run.sh").write_text(OUTER)
    (tmp_path / "inner.sh").write_text(INNER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{BIN}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> list[tuple[str, str]]:
    assert cli.main(["run", "--dry-run", *words]) == 0
    pairs = (line.split(":", 1) for line in capsys.readouterr().out.splitlines())
    return [(name, what.strip()) for name, what in pairs]


@pytest.mark.parametrize(
    "form",
    [
        ["torchrun", "--nproc_per_node", "8"],
        ["torchrun", "--standalone", "--nproc-per-node=8"],
        [str(BIN / "torchrun"), "--nproc-per-node", "8"],
        [sys.executable, "-u", "-m", "torch.distributed.run", "--nproc-per-node", "8"],
        [sys.executable, "-m", "torch.distributed.launch", "--nproc-per-node", "8"],
    ],
)
def test_each_spelling_of_torchrun_is_understood_and_nothing_is_written(
    form: list[str], place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(place.iterdir())
    found = dict(printed(capsys, "--", *form, "pretrain_gpt.py", *ARGUMENTS))
    assert found["script"] == "pretrain_gpt.py"
    assert found["loop"] == "Megatron-LM's, which is watched, and rewound in place"
    assert (found["ranks"], found["nodes"]) == ("8 on each node", "1")
    assert found["layout"] == "tensor-model-parallel-size 2"
    assert (found["batch sizes"], found["save and load"]) == ("global-batch-size 64", "save /ck")
    assert found["run directory"] == "mt-runs/pretrain_gpt, which is new"
    assert sorted(place.iterdir()) == before


def test_the_launching_machine_of_a_hostfile_counts_no_devices(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "hosts").write_text("gpu-01\ngpu-02\n")
    torchrun = ["torchrun", "--nproc-per-node", "gpu", "pretrain_gpt.py"]
    found = dict(printed(capsys, "--hostfile", "hosts", "--", *torchrun, *ARGUMENTS))
    assert found["ranks"] == "gpu on each node"


@pytest.mark.parametrize(
    ("host", "environ", "options", "torchrun", "expected"),
    [
        ("h", SLURM, SHARED, [], {"nodes": "4", "this node": "gpu-17", "job": "slurm-7"}),
        (
            "gpt-3",
            {**KUBERNETES, "JOB_COMPLETION_INDEX": "3"},
            [*SHARED, "--nodes", "8"],
            [],
            {"nodes": "8", "job": "gpt"},
        ),
        (
            "gpt-worker-1",
            {**KUBERNETES, "PET_NNODES": "2"},
            SHARED,
            [],
            {"nodes": "2", "this node": "gpt-worker-1", "job": "gpt"},
        ),
        (
            "gpt-workers-0-1",  # a JobSet's pod, or a platform's: torchrun's options say the rest
            {**KUBERNETES, "JOB_COMPLETION_INDEX": "1"},
            [],
            ["--nnodes=2", "--node-rank=1", "--master-addr=gpt-workers-0-0", "--master-port=3389"],
            {
                "nodes": "2",
                "etcd": "gpt-workers-0-0:3390 on the first node, which runs it (from torchrun's --master-addr)",
            },
        ),
        (
            "h",
            {"PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "10.0.0.7", "PET_MASTER_PORT": "23456"},
            [],
            [],
            {"this node": "0-h", "etcd": "10.0.0.7:23457 on this node, which runs it (from torchrun's --master-addr)"},
        ),
    ],
)
def test_schedulers_and_platforms_are_understood(
    host: str,
    environ: dict[str, str],
    options: list[str],
    torchrun: list[str],
    expected: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    found = dict(printed(capsys, *options, "--", "torchrun", *torchrun, "pretrain_gpt.py"))
    assert {name: found[name] for name in expected} == expected


def test_the_scripts_of_a_launch_are_read_and_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(capsys, "--", "bash", "run.sh")
    assert [name for name, _ in found] == ["form", "ssh", "ends jobs", "warning", "torchrun", "not known"]
    assert found[1][1].startswith("run.sh:4: ssh -f -n $host")
    assert found[3][1].startswith("inner.sh:3: export PATH=/opt/bin (replaces PATH;")
    assert found[4][1] == 'inner.sh:5: cmd="torchrun ${ARGS[@]} pretrain_gpt.py"'


def test_a_script_that_is_named_by_its_folder_is_read_too(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "common").mkdir()
    (place / "common" / "launch.sh").write_text("launch() { torchrun pretrain_gpt.py; }")
    (place / "train.sh").write_text('source "$(dirname "$0")/common/launch.sh"\nlaunch\n')
    found = printed(capsys, "--", "bash", str(place / "train.sh"))
    assert found[1] == ("torchrun", f"{place}/common/launch.sh:1: launch() {{ torchrun pretrain_gpt.py; }}")


def test_a_runner_that_writes_its_own_script_is_understood_before_and_after(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As FlagScale's does."""
    (place / "run.py").write_text("from flagscale.runner.runner_train import SSHTrainRunner\n")
    form, unknown = printed(capsys, "--", "python", "run.py", "action=run")
    assert form == (
        "form",
        "python is not torchrun: it runs unchanged, and each torchrun that it starts gets an agent, unless a warning says otherwise",
    )
    assert unknown[1].endswith("its text names none")
    line = 'cmd="CUDA_VISIBLE_DEVICES=0,1 torchrun --rdzv_id 20261128 --nproc_per_node 2 pretrain_gpt.py"'
    (place / "host_0_run.sh").write_text(f'{line}\nnohup bash -c "$cmd; sync" >> output 2>&1 & echo $! > pid\n')
    found = printed(capsys, "--", "bash", "host_0_run.sh")
    assert [each for each in found if each[0] == "torchrun"] == [("torchrun", f"host_0_run.sh:1: {line}")]


@pytest.mark.parametrize(
    ("lines", "warnings", "lost"),
    [
        (["export PATH=/opt/bin", "torchrun x.py"], ["replaces PATH"], False),
        (["conda activate llm", "torchrun x.py"], ["may put another torchrun first"], False),
        ([". .venv/bin/activate", "torchrun x.py"], ["may put another torchrun first"], False),
        (["cd /x && source env/bin/activate", "torchrun x.py"], ["may put another torchrun first"], False),
        (["module load cuda torch", "torchrun x.py"], ["may put another torchrun first"], False),
        (["export PYTHONPATH=$(pwd)", "torchrun x.py"], ["replaces PYTHONPATH"], False),
        (["export PYTHONPATH=$(pwd):$PYTHONPATH", "conda activate llm", "torchrun x.py"], ["may put another"], False),
        (["conda activate llm", "export PYTHONPATH=$(pwd)", "torchrun x.py"], ["may put", "replaces PYTHONPATH"], True),
        (["export PATH=/opt/llm/bin:$PATH PYTHONPATH=/x", "torchrun x.py"], ["replaces PYTHONPATH"], True),
        (["PYTHONPATH=. python -m torch.distributed.launch x.py"], ["replaces PYTHONPATH"], True),
        (["unset PYTHONPATH", "python -um torch.distributed.run x.py"], ["replaces PYTHONPATH"], True),
        (["python -m torch.distributed.run x.py", "deactivate_all=1"], [], False),
        (
            ["conda activate llm", 'export PYTHONPATH="/my dir:$PYTHONPATH"', "torchrun x.py"],
            ["may put another"],
            False,
        ),
        ([f". /{'a' * 300}.sh", "torchrun x.py"], [], False),  # no file can have this name
    ],
)
def test_lines_behind_which_a_torchrun_may_have_no_agent_are_named(
    lines: list[str], warnings: list[str], lost: bool, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "run.sh").write_text("\n".join(lines))
    found = [what for name, what in printed(capsys, "--", "bash", "run.sh") if name == "warning"]
    assert len(found) == len(warnings)
    assert all(warning in what for warning, what in zip(warnings, found, strict=True))
    assert unwatched(["bash", "run.sh"]) == (found[-1] if lost else "")


def test_a_line_for_one_command_only_is_no_warning_at_the_start(place: Path) -> None:
    (place / "run.sh").write_text("conda activate llm\nPYTHONPATH=. python prepare.py\ntorchrun x.py\n")
    assert unwatched(["bash", "run.sh"]) == ""


@pytest.mark.timeout(60)
def test_a_line_of_a_megabyte_does_not_delay_the_start(place: Path) -> None:
    (place / "genome.fa").write_text("acgt" * 250_000)
    assert unwatched(["python", "genome.fa"]) == ""


@pytest.mark.parametrize(
    "launcher",
    [["accelerate", "launch"], ["deepspeed"], ["lightning", "run"], ["fabric", "run"], ["mpirun", "-n", "8"]],
)
def test_other_launchers_are_one_sentence_that_says_what_to_do(
    launcher: list[str], place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", "--dry-run", "--", *launcher, "pretrain_gpt.py"]) == 2
    said = capfd.readouterr().err
    assert "starts the ranks by itself" in said
    assert "mt-resilient run -- torchrun" in said
    assert said.count("\n") == 1


def test_numbers_of_nodes_that_cannot_hold_the_layout_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["torchrun", "--nproc-per-node", "8", "--nnodes", "3:4", "pretrain_gpt.py"]
    words = ["--pipeline-model-parallel-size", "4", "--tensor-model-parallel-size", "8"]
    found = dict(printed(capsys, *SHARED, "--job", "gpt", "--", *command, *words))
    assert found["other layouts"].startswith("3 nodes cannot hold the script's layout (24 ranks are no multiple of a")


def test_what_would_be_refused_is_refused_in_the_same_words(capfd: pytest.CaptureFixture[str]) -> None:
    words = ["run", "--dry-run", "--", "torchrun", "--nnodes", "2", "pretrain_gpt.py"]
    assert cli.main(words) == 2
    assert "several nodes (2) need --etcd HOST:PORT" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--export", "A", "--", "torchrun", "pretrain_gpt.py"], "--ssh-option and --export are for --hostfile"),
        (["--export", "A", "--", "bash", "run.sh"], "--ssh-option and --export are for --hostfile"),
        (["--hostfile", "hosts", "--", "bash", "run.sh"], "--hostfile starts torchrun on each host, and bash is not"),
        (
            ["--hostfile", "hosts", "--node", "a", "--", "torchrun", "pretrain_gpt.py"],
            "--node, --address and --label are for one node",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused_in_the_same_words(
    words: list[str], says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    said = []
    for dry in (["--dry-run"], []):
        assert cli.main(["run", *dry, *words]) == 2
        said.append(capfd.readouterr().err)
    assert says in said[0]
    assert said[0] == said[1]


@pytest.mark.parametrize(
    ("before", "finished", "runs", "options", "says"),
    [
        (["--lr", "1"], False, False, [], "which exists: the job continues"),
        (["--lr", "1"], True, False, [], "which exists: the job is finished, and nothing starts"),
        (["--lr", "1"], False, True, [], "another mt-resilient is running in"),
        (
            ["--lr", "2"],
            False,
            False,
            [],
            "belongs to another command: --lr is 1 here, and 2 there; nothing was started",
        ),
        (
            ["--lr", "2"],
            False,
            False,
            ["--changed-arguments"],
            "which exists: its last run had other arguments: --lr is 1 here, and 2 there",
        ),
    ],
)
def test_what_the_run_directory_holds_is_compared_with_the_command(
    before: list[str],
    finished: bool,
    runs: bool,
    options: list[str],
    says: str,
    place: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    run = RunDirectory(place / "job")
    run.root.mkdir()
    Journal(run.journal).write("start", 0.0, arguments=["pretrain_gpt.py", *before])
    if finished:
        run.finished.touch()
    if runs:
        run.publish("job", ["127.0.0.1:1"], Papers())
    command = ["run", "--dry-run", "--run-dir", "job", *options, "--", "torchrun", "pretrain_gpt.py", "--lr", "1"]
    refused = says.startswith(("another", "belongs"))
    assert cli.main(command) == (2 if refused else 0)
    out, err = capfd.readouterr()
    assert says in (err if refused else out)


def test_a_named_file_that_is_no_text_is_not_read_and_a_long_one_not_to_its_end(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "program").write_bytes(b"\x7fELF\0\ntorchrun x.py\n")
    (place / "long").write_text(f"torchrun x.py\n{'#' * (1 << 20)}\ntorchrun y.py\n")
    found = printed(capsys, "--", "bash", "program", "long")
    assert [what for name, what in found if name == "torchrun"] == ["long:1: torchrun x.py"]
