"""The model families of examples/ in their layouts, as loops; and the table of what each goes through: python -m tests.megatron.families
[MODEL …], which is what scripts/families runs.

A row is one run behind `mt-resilient run`, hit by NaN at step 4 and by the kill of a rank at step 9. Its cells compare with a run under
plain torchrun: the losses of the steps before the kill; the losses of all steps; the final model and optimizer state.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from .loops import EXAMPLES, TREES, Loop, behind, read_record, undisturbed

NAN, KILL = 4, 9
NEMESIS = f"nan-grad@{NAN}:1,kill@{KILL}:0"

_EP2 = "--expert-model-parallel-size 2 --use-distributed-optimizer"
_TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
_FOLDED = f"{_TP2} --expert-model-parallel-size 2 --expert-tensor-parallel-size 1"
_PP2 = "--pipeline-model-parallel-size 2"
_RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"

LAYOUTS: dict[str, dict[str, str]] = {
    "llama3": {
        "DP2": "--use-distributed-optimizer",
        "TP2, sequence parallel, recompute": f"{_TP2} {_RECOMPUTED}",
        "PP2, interleaved": f"{_PP2} --num-layers 4 --num-layers-per-virtual-pipeline-stage 1",
    },
    "mixtral": {
        "EP2": _EP2,
        "TP2, experts EP2 ETP1": _FOLDED,
        "TP2 DP2, experts EP2 ETP1": f"{_FOLDED} --use-distributed-optimizer",
        "EP2, random routing of each rank": f"{_EP2} --moe-router-force-load-balancing",
    },
    "deepseek_v2": {
        "EP2": _EP2,
        "PP2": _PP2,
    },
    "deepseek_v3": {
        "EP2": _EP2,
        "PP2": _PP2,
        "DP2, recompute, overlapped": f"--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather {_RECOMPUTED}",
    },
}
"""Model → layout → Megatron's arguments; the layouts that run on CPUs with gloo."""
RANKS = {"TP2 DP2, experts EP2 ETP1": 4}
"""The number of ranks by layout, if it is not two."""


def family(model: str, layout: str) -> Loop:
    ranks = RANKS.get(layout, 2)
    return Loop(
        name=f"{model} {layout}",
        script=EXAMPLES / model / "train.sh",
        tree=TREES / "megatron-0.17.1",
        arguments=tuple(LAYOUTS[model][layout].split()),
        ranks=ranks,
        variables=(("MEGATRON_LM", str(TREES / "megatron-0.17.1")), ("RANKS", str(ranks))),
    )


def endure(loop: Loop, place: Path) -> tuple[bool, bool, str]:
    """Run the loop with both faults. Return whether the steps up to the kill, and whether all steps and the final state, are equal to the
    bit to the undisturbed run; and what the agent said."""
    expected, _ = undisturbed(loop)
    job = behind(loop, place, "--durable-every", "5", nemesis=NEMESIS)
    assert job.finish(560) == 0, job.said()[-4000:]
    found = read_record(place)
    told = [(incident.cause, incident.rung, incident.ranks) for incident in job.faults()]
    assert told == [("non_finite", 1, (1,)), ("rank_killed", 2, ())], told

    def early(losses: dict[int, dict[int, tuple[str, float | None]]]) -> list[object]:
        return [row for _, steps in sorted(losses.items()) for step, row in sorted(steps.items()) if step < KILL]

    return early(found.losses) == early(expected.losses), found == expected, job.said()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=" ".join(LAYOUTS))
    wanted = parser.parse_args().models or list(LAYOUTS)
    print("| model | layout | NaN in a gradient | a rank killed |\n|---|---|---|---|", flush=True)
    failed = False
    with tempfile.TemporaryDirectory() as scratch:
        for loop in (family(model, layout) for model in wanted for layout in LAYOUTS[model]):
            model, _, layout = loop.name.partition(" ")
            began = time.monotonic()
            try:
                early, all_of_it, said = endure(loop, Path(scratch, loop.name.replace(" ", "-")))
            except AssertionError as error:
                early = all_of_it = False
                said = str(error)
            cells = ["bits equal" if equal else "**other bits**" for equal in (early, all_of_it)]
            print(f"| {model} | {layout} |", " | ".join(cells), "|", flush=True)
            print(f"{loop.name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
            if not (early and all_of_it):
                failed = True
                print(said[-6000:], file=sys.stderr, flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
