"""The model families of examples/ in their layouts, killed and poisoned; and that each part of their state is needed for equal bits."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ..harness import ROOT
from .families import LAYOUTS, endure, family
from .loops import EXAMPLES, SHIM, TREES, behind, read_record, undisturbed

pytestmark = [pytest.mark.megatron, pytest.mark.slow]

OFTEN = ("deepseek_v3", "EP2")
ALL = [(model, layout) for model, layouts in LAYOUTS.items() for layout in layouts]
FORGOTTEN = [
    ("llama3", "DP2", "model-parallel-rng"),
    ("llama3", "TP2, sequence parallel, recompute", "model-parallel-rng"),
    ("llama3", "PP2, interleaved", "chunk1."),
    ("mixtral", "EP2", "local_experts"),
    ("mixtral", "EP2, random routing of each rank", "expert-parallel-rng"),
    ("deepseek_v2", "EP2", "linear_kv_down_proj"),
    ("deepseek_v2", "EP2", "shared_experts"),
    ("deepseek_v3", "EP2", "expert_bias"),
    ("deepseek_v3", "EP2", "mtp."),
]


@pytest.mark.parametrize(
    ("model", "layout"), [pytest.param(*each, marks=() if each == OFTEN else pytest.mark.variant) for each in ALL]
)
def test_killed_and_poisoned(model: str, layout: str, tmp_path: Path) -> None:
    loop = family(model, layout)
    if reason := loop.missing():
        pytest.skip(reason)
    early, all_of_it, said = endure(loop, tmp_path / "disturbed")
    assert early, said[-4000:]
    assert all_of_it, said[-4000:]


@pytest.mark.variant
def test_with_a_patch_of_the_shape_of_musa_patch(tmp_path: Path) -> None:
    """It replaces `train` by a function of its own module, and keeps the router's bias in a Parameter that nothing trains."""
    loop = family("deepseek_v3", "EP2")
    if reason := loop.missing():
        pytest.skip(reason)
    script = ROOT / "tests" / "musa" / "patched" / "pretrain_deepseek.py"
    loop = replace(loop, name=f"patched {loop.name}", variables=(*loop.variables, ("PRETRAIN", str(script))))
    early, all_of_it, said = endure(loop, tmp_path / "disturbed")
    assert early, said[-4000:]
    assert all_of_it, said[-4000:]


@pytest.mark.variant
@pytest.mark.parametrize(("model", "layout", "what"), FORGOTTEN)
def test_without_any_one_of_these_the_bits_would_differ(model: str, layout: str, what: str, tmp_path: Path) -> None:
    loop = family(model, layout)
    if reason := loop.missing():
        pytest.skip(reason)
    expected, _ = undisturbed(loop)
    place = tmp_path / "disturbed"
    job = behind(loop, place, "--durable-every", "5", nemesis="kill@9:0", NEMESIS_FORGETS=what)
    job.forgets = True
    assert job.finish(280) == 0, job.said()[-4000:]
    found = read_record(place)
    assert found.losses.keys() == expected.losses.keys()
    assert found.digests != expected.digests


_PARSED = """
import sys
from megatron.training.arguments import parse_args
at = next(at for at, word in enumerate(sys.argv) if word.endswith("pretrain_gpt.py"))
del sys.argv[1 : at + 1]
parse_args()
"""


@pytest.mark.parametrize("script", ["train.sh", "full.sh"])
def test_megatron_knows_all_arguments_of_the_families(script: str, tmp_path: Path) -> None:
    """A torchrun that only prints its arguments comes first on PATH. Megatron's own parser reads them."""
    tree = TREES / "megatron-0.17.1"
    if not tree.is_dir():
        pytest.skip(f"{tree} is missing: run scripts/megatron")
    torchrun = tmp_path / "torchrun"
    torchrun.write_text('#!/bin/sh\nfor word; do printf "%s\\0" "$word"; done\n')
    torchrun.chmod(0o755)
    (tmp_path / "hostfile").write_text("gpu-01 slots=8\ngpu-02 slots=8\n")
    launch = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "NODE_RANK": "1", "MEGATRON_LM": str(tree)}
    place = {"HOSTFILE": str(tmp_path / "hostfile"), "DATA": "/data/text_document", "TOKENIZER": "/data/tokenizer"}
    path = {"PYTHONPATH": os.pathsep.join([str(SHIM), str(tree)]), "MCORE_CPU_SHIM": "1"}
    for model in LAYOUTS:
        command = ["bash", str(EXAMPLES / model / script)]
        said = subprocess.run(command, env={**os.environ, **launch, **place}, cwd=tmp_path, capture_output=True)
        assert said.returncode == 0, said.stderr.decode()
        words = said.stdout.decode().split("\0")[:-1]
        assert words, said.stderr.decode()
        parsed = subprocess.run(
            [sys.executable, "-c", _PARSED, *words], env={**os.environ, **path}, capture_output=True, text=True
        )
        assert parsed.returncode == 0, f"{model}: {parsed.stderr[-2000:]}"
