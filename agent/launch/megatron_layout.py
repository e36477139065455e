"""Tells which of the allowed numbers of nodes cannot hold the layout that the script's arguments ask for. With another number of nodes,
only the number of replicas changes. The tensor, pipeline, context and expert parallel sizes and the global batch stay the same. If these
sizes do not fit the number of nodes, Megatron stops at each start with an error. An adviser may name another layout for such a number of
nodes (`layout_adviser.py`). Pure, except that the script's text is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

from ...resilience.text import formatting
from .script_options import number
from .torchrun import Launch

_MOST_BYTES = 1 << 20
_OTHER_BATCHES = ("--rampup-batch-size", "--decrease-batch-size-if-needed", "--step-batch-size-schedule")
"""Options with which the global batch is not the same in all steps."""


_BOUND_TO_STAGES = (
    "--pipeline-model-parallel-layout",
    "--decoder-first-pipeline-num-layers",
    "--decoder-last-pipeline-num-layers",
    "--account-for-embedding-in-pipeline-split",
    "--account-for-loss-in-pipeline-split",
)
"""Options that say how the layers are distributed over the pipeline's stages. With such an option, the number of stages must not change."""
Layout = tuple[str, ...]
"""Megatron's options that change the script's layout. These options come after the script's own options, and override them."""
_TP, _PP, _EP = (f"--{name}-model-parallel-size" for name in ("tensor", "pipeline", "expert"))
_DIVISOR = "--make-vocab-size-divisible-by"
UNDIVIDED = "No other layout divides the ranks, layers, heads and the batch"
Adviser = Callable[[Sequence[str], Mapping[int, Sequence[Layout]]], tuple[dict[int, Layout], str]]
"""A function that chooses layouts. Such an adviser gets the script's arguments, and for each number of ranks the other layouts that fit.
The adviser returns its layout for each number, and why the other numbers have none."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    numbers: tuple[int, ...]
    """The numbers of nodes on which the job may train."""
    layouts: dict[int, Layout] = field(default_factory=dict)
    """For each number of nodes: its layout, if that is not the script's."""
    reasons: dict[int, str] = field(default_factory=dict)
    """For each number of nodes that the job skips: why it has no other layout. Empty: no adviser was asked."""


def fitting(launch: Launch, numbers: tuple[int, ...], adviser: Adviser | None) -> Fit:
    """Return the numbers of nodes that can hold the script's layout, or another one that the adviser has chosen. All numbers are returned
    if the script does not name Megatron, or if no number can hold the script's own layout."""
    if len(numbers) < 2 or launch.form or "megatron" not in text_of(Path(launch.script[0])):
        return Fit(numbers=numbers)
    unfit = {n: n * launch.ranks for n in numbers if misfit(launch.script, n * launch.ranks)}
    if not unfit or len(unfit) == len(numbers):
        return Fit(numbers=numbers)
    there, advised, none = dict[int, Sequence[Layout]](), dict[int, Layout](), ""
    if adviser:
        there = {r: each for r in unfit.values() if (each := tuple(others(launch.script, r, launch.ranks)))}
        advised, none = adviser(launch.script, there)
    layouts = {n: advised[ranks] for n, ranks in unfit.items() if advised.get(ranks) in there.get(ranks, ())}
    reasons = {n: none if ranks in there or not there else UNDIVIDED for n, ranks in unfit.items()}
    return Fit(numbers=tuple(n for n in numbers if n not in unfit or n in layouts), layouts=layouts, reasons=reasons)


def sentences(launch: Launch, asked: Sequence[int], fit: Fit) -> Iterator[str]:
    """Yield what to tell about the numbers of nodes that cannot hold the script's layout. asked: all numbers that the command names."""
    for n in asked:
        nodes, why = formatting.count(n, "node"), misfit(launch.script, n * launch.ranks)
        said = f"{nodes} cannot hold the script's layout ({why}). "
        if n in fit.layouts:
            yield said + f"On {nodes} the job trains in another layout: {' '.join(fit.layouts[n])}"
        elif n not in fit.numbers:
            yield said + ". ".join(filter(None, ["The job skips this number of nodes", fit.reasons.get(n)]))


def others(words: Sequence[str], ranks: int, ranks_of_node: int) -> Iterator[Layout]:
    """Yield the layouts that this number of ranks can hold, with other tensor, pipeline or expert parallel sizes. A tensor-parallel group
    stays within a node, and the padded vocabulary keeps its size, so that a snapshot fits."""
    tp, pp, ep = number(words, _TP, 1), number(words, _PP, 1), number(words, _EP, 1)
    layers, experts = number(words, "--num-layers", 0), number(words, "--num-experts", 1)
    of_chunk = number(words, "--num-layers-per-virtual-pipeline-stage", 0)
    chunks = number(words, "--num-virtual-stages-per-pipeline-rank", 0)  # Megatron takes one of the two options
    heads, padded = number(words, "--num-attention-heads", 0), number(words, _DIVISOR, 128) * tp
    split = [padded, ranks_of_node, heads, number(words, "--num-query-groups", heads)]
    split.append(number(words, "--ffn-hidden-size", heads))
    # With tensor parallel ranks, Megatron's experts need sequence parallelism.
    alone = experts > 1 and "--sequence-parallel" not in words
    stays = {word.partition("=")[0] for word in words}.intersection(_BOUND_TO_STAGES)
    tensor = [
        t for t in _divisors(ranks_of_node) if heads and not any(n % t for n in split) and (t in (1, tp) or not alone)
    ]
    stages = [p for p in _divisors(layers) if p == pp or (not stays and layers % (p * (of_chunk or chunks or 1)) == 0)]
    stages = [p for p in stages if p > 1 or not (of_chunk or chunks)]  # interleaved schedules need more than one stage
    for t, p, e in product(tensor, stages, _divisors(experts)):
        options = [*([_TP, str(t)] * (t != tp)), *([_PP, str(p)] * (p != pp)), *([_EP, str(e)] * (e != ep))]
        options += [_DIVISOR, str(padded // t)] * (t != tp)
        if options and not misfit([*words, *options], ranks):
            yield tuple(options)


def _divisors(whole: int) -> list[int]:
    return [n for n in range(1, whole + 1) if whole % n == 0]


def misfit(words: Sequence[str], ranks: int) -> str:
    """Return why this number of ranks cannot hold Megatron's layout; empty: it can, or the arguments do not say."""
    tp, pp, cp = (
        number(words, f"--{name}", 1)
        for name in ("tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size")
    )
    if ranks % (tp * pp * cp):
        return f"{ranks} ranks are no multiple of a replica's {tp * pp * cp} (TP {tp}, PP {pp}, CP {cp})"
    ep = number(words, "--expert-model-parallel-size", 1)
    etp = number(words, "--expert-tensor-parallel-size", tp)
    if ep > 1 and ranks % (ep * etp * pp):
        return (
            f"{ranks} ranks are no multiple of the {ep * etp * pp} that hold all experts (EP {ep}, ETP {etp}, PP {pp})"
        )
    whole, micro = number(words, "--global-batch-size", 0), number(words, "--micro-batch-size", 0)
    replicas = ranks // (tp * pp * cp)
    fixed = not any(word.partition("=")[0] in _OTHER_BATCHES for word in words)
    if whole and micro and fixed and whole % (micro * replicas):
        return f"the global batch of {whole} does not divide by {replicas} replicas with micro-batches of {micro}"
    return ""


def text_of(file: Path) -> str:
    """Return the beginning of a file; empty: it cannot be read, or is no text."""
    try:
        with file.open("rb") as opened:
            found = opened.read(_MOST_BYTES)
    except OSError:
        return ""
    return "" if b"\0" in found else found.decode(errors="replace")
