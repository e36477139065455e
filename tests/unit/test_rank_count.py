"""How many ranks a node has if the command gives no number: the launcher's own torch counts."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mt_resilient.agent.launch.rank_count import counted
from mt_resilient.agent.launch.torchrun import Launch
from mt_resilient.resilience.errors import UsageError

LAUNCH = Launch(program=("torchrun",), python="python", options=(), ranks=0, script=("train.py",))
TORCH = """
def determine_local_world_size(kind):
    print("some backend's greeting")
    if kind == "gpu":
        raise ValueError("Cuda is not available.")
    return {"musa": 3, "auto": 5}[kind]
"""


def ranks(kind: str, interpreter: tuple[str, ...] = (), **environ: str) -> int:
    return counted(replace(LAUNCH, counts=kind, interpreter=interpreter), environ).ranks


@pytest.fixture
def torch(tmp_path: Path) -> str:
    (package := tmp_path / "torch" / "distributed").mkdir(parents=True)
    for name in ("__init__.py", "../__init__.py"):
        (package / name).touch()
    (package / "run.py").write_text(TORCH)
    return str(tmp_path)


def test_a_number_is_not_counted() -> None:
    assert counted(replace(LAUNCH, ranks=4, interpreter=("/no/such/python",)), {}).ranks == 4


@pytest.mark.parametrize(("kind", "number"), [("musa", 3), ("auto", 5)])
def test_the_launcher_s_torch_counts(kind: str, number: int, torch: str) -> None:
    assert ranks(kind, (sys.executable,), PYTHONPATH=torch, CUDA_VISIBLE_DEVICES="0,1") == number


def test_what_the_launcher_s_torch_refuses_is_refused_with_its_words(torch: str) -> None:
    with pytest.raises(UsageError, match=r"--nproc-per-node gpu: Cuda is not available; nothing was started\. Give"):
        ranks("gpu", (sys.executable,), PYTHONPATH=torch, CUDA_VISIBLE_DEVICES="0,1")


def test_moore_threads_devices_are_counted_without_torch_which_knows_cuda_only(torch: str) -> None:
    given = {"PYTHONPATH": torch, "MUSA_VISIBLE_DEVICES": "0,1"}
    assert [ranks(kind, (sys.executable,), **given) for kind in ("gpu", "auto")] == [2, 2]


def test_the_real_torch_counts_the_cpus_that_this_process_may_use() -> None:
    assert ranks("cpu", (sys.executable,), **os.environ) == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("kind", "environ", "number"),
    [
        ("gpu", {"CUDA_VISIBLE_DEVICES": "0,2,3"}, 3),
        ("gpu", {"MUSA_VISIBLE_DEVICES": "0,1", "CUDA_VISIBLE_DEVICES": "0,2,3"}, 2),
        ("auto", {"MUSA_VISIBLE_DEVICES": "5"}, 1),
        ("musa", {"MUSA_VISIBLE_DEVICES": "0,1"}, 2),
        ("cpu", {}, os.cpu_count()),
    ],
)
def test_the_agent_counts_if_the_launcher_s_torch_does_not(
    kind: str, environ: dict[str, str], number: int, torch: str
) -> None:
    assert ranks(kind, **environ) == number  # only a wrapper knows the launcher's Python
    (Path(torch) / "torch" / "distributed" / "run.py").write_text("import no_such_module")
    assert ranks(kind, (sys.executable,), PYTHONPATH=torch, **environ) == number


def test_devices_that_nothing_can_count_are_refused() -> None:
    with pytest.raises(UsageError, match="--nproc-per-node xpu: give the number of processes on this node"):
        ranks("xpu")
