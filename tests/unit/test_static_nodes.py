"""Several nodes whose torchruns name a master: which of them runs etcd, and what all are called."""

import errno
import socket
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mt_resilient.agent.join.identity import ControlPolicy
from mt_resilient.agent.join.static_nodes import reachable, static
from mt_resilient.agent.launch.torchrun import Launch
from mt_resilient.agent.output.terminal import Terminal
from mt_resilient.agent.run_choice import next_directory
from mt_resilient.agent.run_directory import RunDirectory
from mt_resilient.agent.shared_run import heir
from mt_resilient.checkpoint.backend import paths
from mt_resilient.checkpoint.backend.filesystem import Files
from mt_resilient.resilience.errors import MachineError, UsageError
from mt_resilient.resilience.membership.rank_assignment import NodesPolicy
from mt_resilient.resilience.report.journal import Journal

LAUNCH = Launch(program=("torchrun",), python="python", options=(), ranks=8, script=("/x/pretrain_gpt.py",))
MASTER = {"master": "gpu-01", "port": 14388, "node_rank": "0"}
HERE = ControlPolicy(node="host")


@pytest.mark.parametrize(
    ("said", "serves", "node", "etcd"),
    [
        (MASTER, True, "00-host", "gpu-01:14389"),
        ({**MASTER, "node_rank": "7"}, False, "07-host", "gpu-01:14389"),
        ({"master": "127.0.0.1", "endpoint_port": 29400}, True, "host", "127.0.0.1:29401"),
        ({"master": "192.0.2.1"}, False, "host", "192.0.2.1:29501"),
    ],
)
def test_the_first_node_or_the_one_with_the_masters_address_runs_etcd(
    said: dict[str, Any], serves: bool, node: str, etcd: str
) -> None:
    found = static(replace(LAUNCH, **said), HERE, NodesPolicy(number="16"))
    assert found is not None
    control = found.control
    assert (found.serves, control.node, control.etcd, control.job) == (serves, node, etcd, "pretrain_gpt")
    assert found.below == f"nodes/{node}"


@pytest.mark.parametrize(("host", "serves"), [("gpt-0.gpt", True), ("gpt-1.gpt", False)])
def test_a_pod_whose_name_is_not_in_the_network_yet_is_the_master(
    host: str, serves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*_: object) -> str:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "gethostbyname", unknown)
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.setattr(socket, "gethostname", lambda: "gpt-0")
    found = static(replace(LAUNCH, master=host, endpoint_port=29400), HERE, NodesPolicy(number="2"))
    assert found is not None
    assert found.serves == serves


@pytest.mark.parametrize(("timeout_s", "wait_s"), [(0, 900.0), (1800, 1800)])
def test_a_node_waits_for_the_master_as_long_as_torchrun_would(timeout_s: int, wait_s: float) -> None:
    found = static(replace(LAUNCH, **MASTER, timeout_s=timeout_s), HERE, NodesPolicy(number="2"))
    assert found is not None
    assert found.wait_s == wait_s


@pytest.mark.parametrize(
    ("host", "resolved", "routed", "own"),
    [
        ("gpu-01", "10.0.0.7", True, ("10.0.0.7", False)),
        ("127.0.0.1", "127.0.0.1", True, ("127.0.0.1", False)),
        ("localhost", "127.0.0.1", True, ("10.0.0.7", True)),  # a PyTorchJob's master may have it as MASTER_ADDR
        ("0.0.0.0", "0.0.0.0", True, ("10.0.0.7", True)),
        ("gpu-01", "127.0.1.1", True, ("10.0.0.7", True)),
        ("gpt-master", "10.96.0.9", True, ("10.0.0.7", True)),  # the address of a Service of Kubernetes
        ("localhost", "127.0.0.1", False, ("127.0.0.1", True)),
        ("gpt-master", "10.96.0.9", False, ("127.0.0.1", True)),
    ],
)
def test_a_master_that_does_not_have_the_address_of_its_name_is_reached_by_the_others(
    host: str, resolved: str, routed: bool, own: tuple[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Routed(socket.socket):
        def bind(self, address: Any) -> None:
            if address[0] == "10.96.0.9":
                raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")

        def connect(self, address: object) -> None:
            if not routed:
                raise OSError(errno.ENETUNREACH, "Network is unreachable")

        def getsockname(self) -> tuple[str, int]:
            return "10.0.0.7", 0

    monkeypatch.setattr(socket, "gethostbyname", {host: resolved}.__getitem__)
    monkeypatch.setattr(socket, "socket", Routed)
    assert reachable(host, 0.0, Terminal()) == own


def test_a_master_waits_for_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubernetes gives a pod its name in the network once the pod is ready."""
    answers = [socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "0.0.0.0"]

    def resolve(host: str) -> str:
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return str(answer)

    monkeypatch.setattr(socket, "gethostbyname", resolve)
    assert reachable("gpt-0", 60.0, Terminal())[1]
    answers.append(socket.gaierror(socket.EAI_NONAME, "Name or service not known"))
    with pytest.raises(MachineError, match="--master-addr gpt-0: Name or service not known; nothing was started"):
        reachable("gpt-0", 0.0, Terminal())


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (
            {"master": "etcd-1", "endpoint_port": 2379, "rdzv_backend": "etcd-v2"},
            "etcd-v2.*nothing was started. Add --etcd etcd-1:2379",
        ),
        (
            {"master": "etcd-1", "rdzv_backend": "etcd", "node_rank": "1"},
            "backend etcd.*nothing was started. Add --etcd etcd-1:2379",
        ),
        ({"master": "fd00::1", "node_rank": "0"}, "the master fd00::1 has only an IPv6 address.*nothing was started"),
        (
            {"master": "[fd00::1]", "node_rank": "1", "endpoint_port": 29400},
            "IPv6.*nothing was started. Name an etcd with --etcd",
        ),
    ],
)
def test_what_cannot_run_the_etcd_of_all_nodes_is_refused_on_each_node(said: dict[str, Any], why: str) -> None:
    launch = replace(LAUNCH, **said)
    with pytest.raises(UsageError, match=why):
        static(launch, HERE, NodesPolicy(number="2"))
    assert static(launch, HERE, NodesPolicy(number="1")) is None
    assert static(launch, replace(HERE, etcd="etcd-1:2379"), NodesPolicy(number="2")) is None


@pytest.mark.parametrize(
    ("script", "form", "name"),
    [
        ("torchtitan.train", "--module", "train"),
        ("train_wan2.2_i2v.py", "", "train_wan2.2_i2v"),
        ("/x/my train (2).py", "", "my-train--2-"),
        ("./package", "", "package"),
    ],
)
def test_a_job_has_its_scripts_name(script: str, form: str, name: str) -> None:
    found = static(replace(LAUNCH, **MASTER, script=(script,), form=form), HERE, NodesPolicy(number="2"))
    assert found is not None
    assert found.control.job == name


@pytest.mark.parametrize(
    ("said", "control", "nodes"),
    [
        (MASTER, HERE, "1"),
        ({}, HERE, "2"),
        (MASTER, replace(HERE, etcd="etcd-1:2379"), "2"),
    ],
)
def test_one_node_an_etcd_that_is_given_and_no_master_are_as_before(
    said: dict[str, Any], control: ControlPolicy, nodes: str
) -> None:
    assert static(replace(LAUNCH, **said), control, NodesPolicy(number=nodes)) is None


def started(whole: Path, node: str, launch: str, *arguments: str) -> tuple[str, ExitStack]:
    """Do what one node's agent does with the run directory at its start. Return the job's identity, and what ends the agent."""
    run, closing = RunDirectory(whole / "nodes" / node), ExitStack()
    run.take()
    closing.callback(run.release)
    try:
        adopts = heir(whole, run, launch, arguments, closing)
        run.own(Files(whole / paths.SNAPSHOTS), launch, whole if adopts else None)
    except UsageError:
        closing.close()
        raise
    Journal(run.journal).write("start", 0.0, arguments=list(arguments))
    return run.identity, closing


def test_nodes_that_were_not_there_before_continue_a_job_that_is_submitted_again(tmp_path: Path) -> None:
    """Slurm gives each submission another number, and perhaps other hosts."""
    first = [started(tmp_path, node, "slurm-1", "a") for node in ("0-h1", "1-h2")]
    for _, agent in first:
        agent.close()
    again = [started(tmp_path, node, "slurm-2", "a") for node in ("0-h1", "1-h3", "2-h2")]
    assert len({identity for identity, _ in (*first, *again)}) == 1
    for _, agent in again:
        agent.close()


@pytest.mark.parametrize("launch", ["slurm-1", "slurm-2"])
def test_a_new_node_with_other_arguments_is_refused_with_the_difference(launch: str, tmp_path: Path) -> None:
    started(tmp_path, "0-h1", "slurm-1", "a")[1].close()
    with pytest.raises(UsageError, match=r"belongs to another command: .*nothing was started.*--changed-arguments"):
        started(tmp_path, "0-h4", launch, "b")


def test_a_node_does_not_adopt_the_snapshots_of_a_launch_that_runs(tmp_path: Path) -> None:
    agents = [started(tmp_path, node, "slurm-1", "a")[1] for node in ("0-h1", "1-h2")]
    with pytest.raises(UsageError, match="another job's"):
        started(tmp_path, "0-h3", "slurm-2", "a")
    for agent in agents:
        agent.close()
    started(tmp_path, "0-h3", "slurm-2", "a")[1].close()


def snapshot_in(whole: Path) -> None:
    """Write what one snapshot of a job leaves there."""
    run = next(whole.glob("nodes/*/journal.jsonl")).parent
    Journal(run / "journal.jsonl").write("start", 1.0, arguments=RunDirectory(run).arguments, snapshots=str(whole))
    (attempt := whole / paths.SNAPSHOTS / "0000000005-g1-abcdef010000").mkdir(parents=True)
    (attempt / paths.COMMIT).touch()


def test_a_new_node_chooses_the_run_directory_as_the_other_nodes_do(tmp_path: Path) -> None:
    base, new = tmp_path / "train", "nodes/1-h3"
    assert next_directory(base, ["a"], new) == base
    started(base, "0-h1", "slurm-1", "a")[1].close()
    assert next_directory(base, ["a"], new) == base
    assert next_directory(base, ["b"], new) == tmp_path / "train.2"
    snapshot_in(base)
    assert next_directory(base, ["b"], new) == base  # refused there, with the difference: its progress may be wanted
    RunDirectory(base / "nodes" / "0-h1").finished.touch()
    assert next_directory(base, ["a"], new) == next_directory(base, ["a"], "nodes/0-h1") == tmp_path / "train.2"


def test_another_job_of_the_same_script_that_runs_on_other_nodes_is_not_in_the_way(tmp_path: Path) -> None:
    """Both were started in one folder, at the same time. The first one has a snapshot."""
    base = tmp_path / "train"
    _, agent = started(base, "0-h1", "train", "a")
    snapshot_in(base)
    assert next_directory(base, ["b"], "nodes/0-h3") == tmp_path / "train.2"
    agent.close()
    assert next_directory(base, ["b"], "nodes/0-h3") == base  # now it may be the job that the user wants to continue
