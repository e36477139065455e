"""The ground that every chaos test stands on: without faults, real loops repeat to the bit; and the faults are real."""

import math
import signal
import struct
import subprocess
from pathlib import Path

import pytest

from .loops import (
    BRIDGE_DP2,
    CHECKOUT_LOOPS,
    LETS_NAN_PASS,
    LOOPS,
    MEGATRON_DP2,
    MEGATRON_TP2_PP2,
    Loop,
    Record,
    command,
    read_record,
    recording,
    undisturbed,
)

pytestmark = pytest.mark.megatron

OFTEN = (MEGATRON_TP2_PP2,)
ALL = [
    *(pytest.param(loop, id=loop.name, marks=() if loop in OFTEN else pytest.mark.variant) for loop in LOOPS),
    *(
        pytest.param(loop, id=loop.name, marks=[pytest.mark.mlm, *([pytest.mark.variant] if at else [])])
        for at, loop in enumerate(CHECKOUT_LOOPS)
    ),
]
DATA_PARALLEL = [
    pytest.param(MEGATRON_DP2, id=MEGATRON_DP2.name),
    pytest.param(BRIDGE_DP2, id=BRIDGE_DP2.name, marks=pytest.mark.variant),
]


def run(loop: Loop, directory: Path, *extra_arguments: str, nemesis: str = "") -> tuple[int, str, Record]:
    """The exit code of torchrun, all that was printed, and the record."""
    reason = loop.missing()
    if reason is not None:
        pytest.skip(reason)
    directory.mkdir()
    argv, environment = command(loop, extra_arguments)
    environment.update(recording(directory, nemesis))
    done = subprocess.run(
        argv, env=environment, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120
    )
    return done.returncode, done.stdout, read_record(directory)


def loss_of(record: Record, rank: int, iteration: int) -> float:
    return struct.unpack("<f", bytes.fromhex(record.losses[rank][iteration][0]))[0]


@pytest.mark.parametrize("loop", ALL)
def test_every_rank_computes_every_step_and_learns(loop: Loop) -> None:
    if (reason := loop.missing()) is not None:
        pytest.skip(reason)
    record, _ = undisturbed(loop)
    assert record.digests.keys() == record.losses.keys() == set(range(loop.ranks))
    assert all(list(rows) == list(range(1, loop.iterations + 1)) for rows in record.losses.values())
    last_rank = loop.ranks - 1
    assert loss_of(record, last_rank, loop.iterations) < loss_of(record, last_rank, 1)


@pytest.mark.variant
@pytest.mark.parametrize("loop", DATA_PARALLEL)
def test_two_runs_are_the_same_to_the_bit(loop: Loop, tmp_path: Path) -> None:
    """Of the other layouts `test_killed_and_poisoned` shows it, whose runs are compared with undisturbed ones."""
    code, output, record = run(loop, tmp_path / "run")
    assert code == 0, output
    assert record == undisturbed(loop)[0]


@pytest.mark.variant
@pytest.mark.parametrize("loop", DATA_PARALLEL)
def test_nemesis_poisons_one_gradient_once(loop: Loop, tmp_path: Path) -> None:
    code, output, record = run(loop, tmp_path / "run", *LETS_NAN_PASS, nemesis="nan-grad@4:1")
    assert code == 0, output
    assert output.count("nemesis: nan-grad at iteration 4 on rank 1") == 1
    for rank, rows in record.losses.items():
        norms = {iteration: grad_norm for iteration, (_, grad_norm) in rows.items() if grad_norm is not None}
        assert math.isfinite(norms[3])
        assert math.isnan(norms[4])
        assert math.isfinite(loss_of(record, rank, 4)), "the loss of that step was computed before its gradients"
        assert math.isnan(loss_of(record, rank, 5))


@pytest.mark.variant
@pytest.mark.parametrize(
    ("nemesis", "exit_code"), [("nan-grad@4:1", 17), pytest.param("nan-grad*2@4:1", 16, marks=pytest.mark.variant)]
)
def test_megatron_itself_answers_nan_by_leaving(nemesis: str, exit_code: int, tmp_path: Path) -> None:
    """Its rerun machine computes the step again: 17 when the NaN is gone then, 16 when it is there again."""
    save = ("--save", str(tmp_path / "checkpoints"), "--save-interval", "100")
    code, output, record = run(MEGATRON_DP2, tmp_path / "run", *save, nemesis=nemesis)
    assert code == 1
    assert f"exitcode  : {exit_code}" in output, output
    assert max(record.losses[0]) == 4
    assert record.losses[0][4] == ("-", None)


@pytest.mark.variant
def test_nemesis_kills_in_the_middle_of_a_step(tmp_path: Path) -> None:
    code, output, record = run(MEGATRON_DP2, tmp_path / "run", nemesis="kill@4:0")
    assert code == 1
    assert f"Signal {signal.SIGKILL.value} (SIGKILL) received" in output, output
    assert {rank: max(rows) for rank, rows in record.losses.items()} == {0: 3, 1: 3}
    assert not record.digests
