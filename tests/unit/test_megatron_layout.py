"""Numbers of nodes on which Megatron's layout does not fit are left out, so that no start is tried there."""

import os
import sys
from pathlib import Path

import pytest

from mt_resilient.agent.launch.megatron_layout import fitting, misfit
from mt_resilient.agent.launch.torchrun import understand

TP, PP, CP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size"
EP, ETP = "--expert-model-parallel-size", "--expert-tensor-parallel-size"
MICRO, WHOLE = "--micro-batch-size", "--global-batch-size"


@pytest.mark.parametrize(
    ("words", "ranks", "why"),
    [
        ("", 24, ""),
        (f"{TP} 8", 24, ""),
        (f"{TP} 2 {PP} 4 {CP} 2", 24, "no multiple of a replica's 16"),
        (f"{TP}=2 {PP}=4 {CP}=2", 32, ""),
        (f"{TP} 1 {EP} 16", 24, "16 that hold all experts"),
        (f"{TP} 2 {EP} 4", 24, ""),
        (f"{TP} 2 {PP} 2 {EP} 8 {ETP} 1", 24, "16 that hold all experts"),
        (f"{TP} 2 {PP} 2 {EP} 8", 64, ""),
        (f"{MICRO} 1 {WHOLE} 64", 24, "64 does not divide by 24 replicas"),
        (f"{MICRO} 1 {WHOLE} 96", 24, ""),
        (f"{MICRO} 2 {WHOLE} 64 --rampup-batch-size 8 8 1000", 24, ""),
        (f"{WHOLE} 64", 24, ""),
        (f"{TP} two {PP}", 24, ""),
    ],
)
def test_a_layout_fits_or_the_reason_is_said(words: str, ranks: int, why: str) -> None:
    found = misfit(["pretrain_gpt.py", *words.split()], ranks)
    assert why in found if why else not found


@pytest.mark.parametrize(
    ("text", "words", "expected"),
    [
        ("from megatron.training import pretrain", f"{MICRO} 1 {WHOLE} 64", [3]),
        (
            "from megatron.training import pretrain",
            f"{MICRO} 1 {WHOLE} 7",
            [],
        ),  # nothing would be left: the script shall say
        ("import torch", f"{MICRO} 1 {WHOLE} 64", []),  # another script may mean something else
    ],
)
def test_only_numbers_that_a_megatron_script_cannot_use_are_left_out(
    text: str, words: str, expected: list[int], tmp_path: Path
) -> None:
    script = tmp_path / "pretrain_gpt.py"
    script.write_text(text)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "8", str(script), *words.split()]
    numbers, sentences = fitting(understand(command, os.environ), (2, 3, 4))
    assert sorted({2, 3, 4} - {*numbers}) == expected
    assert len(sentences) == len(expected)
