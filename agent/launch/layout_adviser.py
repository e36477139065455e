"""Asks SimuMax, Moore Threads' model of a training, for a layout for each number of nodes that cannot hold the script's own layout.

SimuMax must be installed, and the user must name its descriptions of the model and of the machine."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...resilience.membership.rank_assignment import NodesPolicy
from .megatron_layout import UNDIVIDED, Layout
from .script_options import number, value

_PROGRAM = Path(__file__).with_name("simumax_program.py")
_NEEDED = (
    "--num-layers",
    "--hidden-size",
    "--num-attention-heads",
    "--seq-length",
    "--micro-batch-size",
    "--global-batch-size",
)


def simumax(
    policy: NodesPolicy, words: Sequence[str], layouts: Mapping[int, Sequence[Layout]], most_s: float = 10.0
) -> tuple[dict[int, Layout], str]:
    """Return SimuMax's choice of `layouts` for each number of ranks, and why there is none for the rest. most_s: how long SimuMax may take
    for all numbers. The answers that SimuMax has given within this time count."""
    if missing := [option for option in _NEEDED if not number(words, option, 0)]:
        return {}, f"SimuMax was not asked: the arguments do not give {' and '.join(missing)}"
    if not layouts:
        return {}, UNDIVIDED
    asked = question(words, layouts) | {"model": policy.simumax_model, "system": policy.simumax_system}
    late = ""
    try:
        done = subprocess.run(
            [sys.executable, str(_PROGRAM)], input=json.dumps(asked), capture_output=True, text=True, timeout=most_s
        )
        out, failed = done.stdout, done.stderr.strip().rpartition("\n")[2] if done.returncode else ""
    except subprocess.TimeoutExpired as error:
        out, failed = (error.stdout or b"").decode(), ""  # bytes, despite text=True
        late = f"SimuMax did not answer within {most_s:.0f} s"
    except OSError as error:
        return {}, f"SimuMax could not be asked: {error}"
    answers = [json.loads(line) for line in out.splitlines() if line.endswith("}")]
    refused = next((f"SimuMax was not asked: {answer['refused']}" for answer in answers if "refused" in answer), "")
    chosen = {answer["ranks"]: tuple(answer["options"]) for answer in answers if "options" in answer}
    wrong = f"SimuMax failed: {failed}" if failed else ""
    return chosen, refused or wrong or late or "SimuMax found no layout that fits into the memory"


def question(words: Sequence[str], layouts: Mapping[int, Sequence[Layout]]) -> dict[str, Any]:
    """Return the question to SimuMax, in its own names (`ModelConfig`, `StrategyConfig`)."""
    facts = {
        "layer_num": number(words, "--num-layers", 0),
        "hidden_size": number(words, "--hidden-size", 0),
        "head_num": number(words, "--num-attention-heads", 0),
        "expert_num": number(words, "--num-experts", 1),
    }
    full = value(words, "--recompute-granularity") == "full"
    block = value(words, "--recompute-method") == "block"
    strategy = {
        "seq_len": number(words, "--seq-length", 0),
        "micro_batch_size": number(words, "--micro-batch-size", 0),
        "cp_size": number(words, "--context-parallel-size", 1),
        "enable_sequence_parallel": "--sequence-parallel" in words,
        "zero_state": int("--use-distributed-optimizer" in words),
        "overlap_grad_reduce": "--overlap-grad-reduce" in words,
        "fp8": any(word.startswith("--fp8-format") for word in words),
        "enable_recompute": full,
        "recompute_granularity": "full_block" if full else None,
    }

    def described(options: Layout) -> dict[str, Any]:
        all_words = [*words, *options]
        pp = number(all_words, "--pipeline-model-parallel-size", 1)
        tp = number(all_words, "--tensor-model-parallel-size", 1)
        stage = facts["layer_num"] // pp
        per_chunk = number(words, "--num-layers-per-virtual-pipeline-stage", stage)
        return {
            "options": options,
            "tp_size": tp,
            "pp_size": pp,
            "ep_size": number(all_words, "--expert-model-parallel-size", 1),
            "etp_size": number(words, "--expert-tensor-parallel-size", tp),
            "interleaving_size": number(words, "--num-virtual-stages-per-pipeline-rank", stage // per_chunk or 1),
            "recompute_layer_num": min(stage, number(words, "--recompute-num-layers", stage)) if block else stage,
        }

    return {
        "facts": facts,
        "strategy": strategy,
        "global_batch_size": number(words, "--global-batch-size", 0),
        "layouts": {ranks: [described(options) for options in each] for ranks, each in layouts.items()},
    }
