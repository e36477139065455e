"""What the environment says about this node: Slurm, Kubernetes, torchrun's options, and ours above all."""

from collections.abc import Mapping
from typing import Any

import pytest

from mt_resilient.agent.launch.scheduler_env import Place, labels, place, task
from mt_resilient.agent.launch.torchrun import Launch
from mt_resilient.resilience.errors import UsageError

STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_NNODES": "4",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_NODEID": "2",
    "SLURM_LOCALID": "0",
    "SLURMD_NODENAME": "gpu-17",
}
"""As srun gives it to one of four tasks."""
BATCH = {name: value for name, value in STEP.items() if not name.startswith(("SLURM_STEP", "SLURM_LOCAL"))}
"""As a batch script has it, on the first of four nodes."""
POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}
LOOP = {**STEP, "SLURM_STEP_NUM_NODES": "1"}
"""As `srun -N1 -n1 -w gpu-17` gives it, in a loop over the nodes."""
HOST = "gpt-3"
NONE: dict[str, str] = {}


def asked(node: str = "", nodes: str = "", spares: int = 0, job: str = "") -> Place:
    return Place(node=node, nodes=nodes, spares=spares, job=job)


def torchrun(said: Mapping[str, Any]) -> Launch:
    return Launch(program=("torchrun",), python="python", options=(), ranks=8, script=("train.py",), **said)


def told(options: Place, said: Mapping[str, Any], environ: Mapping[str, str]) -> tuple[str, str, int, str]:
    found = place(options, torchrun(said), environ, HOST)
    return found.node, found.nodes, found.spares, found.job


@pytest.mark.parametrize(
    ("options", "said", "environ", "expected"),
    [
        # nobody but the host
        (asked(), NONE, NONE, (HOST, "", 0, "")),
        (asked(), {"nodes": "2"}, NONE, (HOST, "2", 0, "")),
        (asked(), {"rdzv_id": "gpt", "nodes": "1:3"}, NONE, (HOST, "1:3", 0, "gpt")),
        (asked(), {"rdzv_id": "2026-11-27_21:38:21", "nodes": "2"}, NONE, (HOST, "2", 0, "")),  # new at each launch
        (asked(), {"rdzv_id": "run-20261127_213821.5"}, STEP, ("gpu-17", "4", 0, "slurm-4711")),
        (asked(), {"rdzv_id": "gpt-20999"}, STEP, ("gpu-17", "4", 0, "gpt-20999")),
        (asked(), {"rdzv_id": "llm/7b+a,b=c d", "nodes": "2"}, NONE, (HOST, "2", 0, "llm-7b-a-b-c-d")),
        (asked("a", "3", 1, "j"), {"nodes": "2", "rdzv_id": "x"}, NONE, ("a", "3", 1, "j")),
        # Slurm
        (asked(), NONE, STEP, ("gpu-17", "4", 0, "slurm-4711")),
        (asked(spares=1), NONE, STEP, ("gpu-17", "3", 1, "slurm-4711")),
        (asked(), {"nodes": "4"}, STEP, ("gpu-17", "4", 0, "slurm-4711")),
        (asked(spares=1), {"nodes": "3"}, STEP, ("gpu-17", "3", 1, "slurm-4711")),
        (asked(), {"nodes": "2:4"}, STEP, ("gpu-17", "2:4", 0, "slurm-4711")),
        (asked(), {"nodes": "2:8"}, STEP, ("gpu-17", "2:8", 0, "slurm-4711")),
        (asked(), {"nodes": "2,4"}, STEP, ("gpu-17", "2,4", 0, "slurm-4711")),
        (asked(spares=1), {"nodes": "2,3"}, STEP, ("gpu-17", "2,3", 1, "slurm-4711")),
        (asked(nodes="8"), {"nodes": "2"}, STEP, ("gpu-17", "8", 0, "slurm-4711")),
        (asked(), NONE, {**STEP, "SLURM_RESTART_COUNT": "3"}, ("gpu-17", "4", 0, "slurm-4711")),
        (asked(), NONE, {**STEP, "SLURM_ARRAY_JOB_ID": "47", "SLURM_ARRAY_TASK_ID": "9"}, ("gpu-17", "4", 0, "slurm-47-9")),
        (asked(nodes="1"), NONE, BATCH, ("gpu-17", "1", 0, "slurm-4711")),
        (asked(), NONE, {**BATCH, "SLURM_JOB_NUM_NODES": "1"}, ("gpu-17", "1", 0, "slurm-4711")),
        # a loop starts a torchrun on each node
        (asked(), {"nodes": "4", "master": "gpu-16"}, LOOP, ("gpu-17", "4", 0, "")),
        (asked(), {"nodes": "2:4", "master": "gpu-16"}, LOOP, ("gpu-17", "2:4", 0, "")),
        (asked(), {"nodes": "4", "master": "gpu-16"}, BATCH, ("gpu-17", "4", 0, "")),
        (asked(job="j"), {"nodes": "4", "master": "gpu-16"}, LOOP, ("gpu-17", "4", 0, "j")),
        (asked(nodes="4"), {"nodes": "4", "master": "gpu-16"}, LOOP, ("gpu-17", "4", 0, "slurm-4711")),
        (asked(), {"nodes": "4", "master": "gpu-16"}, STEP, ("gpu-17", "4", 0, "slurm-4711")),
        # a training on each node, or in each task
        (asked(), {"alone": True}, STEP, ("gpu-17", "1", 0, "slurm-4711")),
        (asked(), {"alone": True, "nodes": "1"}, {**STEP, "SLURM_LOCALID": "1"}, ("gpu-17", "1", 0, "slurm-4711")),
        (asked(), {"alone": True}, BATCH, ("gpu-17", "1", 0, "slurm-4711")),
        # Kubernetes
        (asked(nodes="4"), NONE, {**POD, "JOB_COMPLETION_INDEX": "3"}, (HOST, "4", 0, "gpt")),
        (asked("m-9"), NONE, {**POD, "JOB_COMPLETION_INDEX": "3"}, ("m-9", "", 0, "gpt")),
        (asked(), NONE, POD, (HOST, "", 0, "")),
        (asked(), NONE, {**POD, "JOB_COMPLETION_INDEX": "7"}, (HOST, "", 0, "")),
        (asked(), NONE, {**POD, "PET_NNODES": "2"}, (HOST, "", 0, "")),
        (asked(), NONE, {**POD, "WORLD_SIZE": "16", "RANK": "3"}, (HOST, "", 0, "")),
    ],
)  # fmt: skip
def test_own_options_precede_torchrun_s_and_these_the_scheduler_s(
    options: Place, said: dict[str, Any], environ: dict[str, str], expected: tuple[str, str, int, str]
) -> None:
    assert told(options, said, environ) == expected


@pytest.mark.parametrize(
    ("options", "said", "environ", "sentence"),
    [
        (asked(), {"nodes": "2"}, STEP, "runs this on 4 nodes, but the command says --nnodes 2; nothing was started. Say --spares 2"),
        (asked(), {"nodes": "6"}, STEP, "--nnodes 6; nothing was started. Ask for more nodes"),
        (asked(spares=2), {"nodes": "3"}, STEP, "says --nnodes 3 and --spares 2; nothing was started. Say --spares 1"),
        (asked(), {"nodes": "2:3"}, STEP, "--nnodes 2:3"),
        (asked(), {"nodes": "4"}, LOOP, "runs this on 1 nodes, but the command says --nnodes 4"),
        (asked(), {"nodes": "2", "master": "gpu-16"}, STEP, "runs this on 4 nodes, but the command says --nnodes 2"),
        (asked(), {"nodes": "all"}, STEP, "--nodes all is not valid: write a number"),
        (asked(spares=4), NONE, STEP, "--spares 4: Slurm runs this on 4 nodes, so that none is left to train"),
        (asked(), NONE, BATCH, "given this job 4 nodes, but mt-resilient runs on only one of them"),
        (asked(), NONE, {**STEP, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_NODES": "1"}, "Put srun --ntasks-per-node=1 in front"),
        (asked(), NONE, {**STEP, "SLURM_LOCALID": "1"}, "started mt-resilient more than once on gpu-17"),
    ],
)  # fmt: skip
def test_contradictions_are_refused_with_one_sentence(
    options: Place, said: dict[str, Any], environ: dict[str, str], sentence: str
) -> None:
    with pytest.raises(UsageError) as caught:
        told(options, said, environ)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_pod_s_host_name_gives_the_name_of_its_pytorchjob() -> None:
    assert place(asked(), torchrun(NONE), {**POD, "PET_NNODES": "2"}, "x-worker-0") == Place(node="x-worker-0", job="x")


def test_a_task_has_a_number_only_among_others() -> None:
    assert task({**STEP, "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4"}) == "3"
    assert task({**STEP, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}) == task({}) == ""
    assert task({**STEP, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "8"}) == "", "an interactive shell"


@pytest.mark.parametrize(
    ("address", "pattern", "expected"),
    [
        ("s0.s1.gpu-17", "switch.switch.node", {"rack": "s0.s1"}),
        ("gpu-17", "node", {}),  # no topology is configured
        ("s0.s1.gpu-18", "switch.switch.node", {}),  # another node's, handed on
        ("", "", {}),
    ],
)
def test_the_switches_above_a_node_are_its_rack(address: str, pattern: str, expected: dict[str, str]) -> None:
    assert labels({**STEP, "SLURM_TOPOLOGY_ADDR": address, "SLURM_TOPOLOGY_ADDR_PATTERN": pattern}) == expected
    assert labels({}) == {}
