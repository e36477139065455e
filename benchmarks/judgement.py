"""Measure how the ranks judge losses: what the judgement costs healthy trainings, and how soon sick trainings are found. No job runs.

    python benchmarks/judgement.py [--curves DIRECTORY] [--steps N] [--seeds N]

The benchmark gives each curve, step by step, to the ranks' own judgement and to their ladder of answers. A replay of the same data gives
the same losses; skipped data is cut out of the curve. Healthy curves: those in DIRECTORY (files *.csv or *.csv.gz with the columns step,
loss, grad_norm), and synthetic ones. Sick curves: a falling loss with four kinds of noise, disturbed at a randomly drawn step. The peer is
the former rule, which acted on each spike.

Predicted: nothing in healthy curves, except where a loss rises by design; a jump is found after half of `spikes.patience_steps`.
"""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Executor, ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from curves import NOISES, SICK, TOLD, Curve, healthy, recorded, told, training
from measure import Result, arguments, count, median, report, say

from mt_resilient.resilience.inprocess import loss_level, loss_spike, rewind_ladder
from mt_resilient.resilience.inprocess.loss_level import Level
from mt_resilient.resilience.inprocess.loss_spike import Figure, Finding, SpikePolicy
from mt_resilient.resilience.inprocess.rewind_ladder import LadderPolicy
from mt_resilient.resilience.model.cause import Kind
from mt_resilient.resilience.model.rewind import SKIPS, Remedy, Turn
from mt_resilient.resilience.model.types import Step

SPIKES, LADDER = SpikePolicy(), LadderPolicy()
SPAN = SPIKES.baseline_steps + SPIKES.run_steps + SPIKES.patience_steps


def found(figures: list[Figure], level: Level, patient: bool) -> tuple[Finding | None, Level]:
    """Return what is found at the newest figure. patient=False: apply the former rule, which acted on each spike."""
    if patient:
        return loss_level.judge(figures[-SPAN:], level, SPIKES)
    spike = loss_spike.spike(figures[-SPIKES.baseline_steps - SPIKES.run_steps :], SPIKES)
    return spike and Finding(kind=Kind.LOSS_DIVERGENCE, onset=spike.onset, seen=spike.seen), level


def played(curve: Curve, patient: bool = True, first: bool = False) -> tuple[Counter[str], list[Finding]]:
    """Return what the judgement costs a training with this curve, and what was found. first: stop at the first finding that causes an
    action."""
    paid: Counter[str] = Counter()
    findings: list[Finding] = []
    data = list(zip(curve.losses.tolist(), curve.norms.tolist(), strict=True))
    figures: list[Figure] = []
    levels = [Level()]
    turns: list[Turn] = []
    while len(figures) < len(data):
        loss, norm = data[len(figures)]
        figures.append(Figure(Step(len(figures) + 1), loss, None if np.isnan(norm) else norm))
        finding, level = found(figures, levels[-1], patient)
        levels.append(level)
        if finding is None:
            continue
        findings.append(finding)
        answer = rewind_ladder.answer(finding, turns, LADDER, skippable=True)
        if answer.remedy is Remedy.WAIT:
            continue
        if first:
            break
        to = max(0, answer.at_most)
        paid["steps computed again"] += len(figures) - to
        del figures[to:], levels[to + 1 :]
        window = answer.window(finding.onset, Step(to), ())
        if answer.remedy in SKIPS and window:
            paid["batches skipped"] += window.stop - window.start
            del data[window.start : window.stop]
        if answer.remedy is Remedy.CONTINUE:
            paid["jobs ended"] += not patient  # under the former rule, this ended the job
            figures, levels = [each._replace(loss=None) for each in figures], [Level()] * (to + 1)
        turns.append(Turn(kind=finding.kind, onset=finding.onset, to=Step(to), remedy=answer.remedy, window=window))
        if len(turns) > 1000:
            break
    return paid, findings


PAID = {"steps computed again": 20.0, "batches skipped": 0.0, "jobs ended": 0.0}
"""The most that the judgement may cost healthy trainings in 100,000 steps."""


def of_healthy(kind: str, curves: list[tuple[str, Curve]], pool: Executor) -> list[Result]:
    names, each = zip(*curves, strict=True)
    steps = sum(len(curve.losses) for curve in each)
    hasty = pool.map(partial(played, patient=False), each)
    total: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}
    for name, curve, (paid, findings) in zip(names, each, pool.map(played, each), strict=True):
        total[True] += paid
        watched = sum(finding.kind is not Kind.LOSS_DIVERGENCE for finding in findings)
        say(f"{kind}, {name}: {len(curve.losses)} steps, {watched} spikes watched, paid {dict(paid) or 'nothing'}")
    for paid, _ in hasty:
        total[False] += paid
    return [
        Result(
            f"{kind}: {what}",
            total[True][what] * 1e5 / steps,
            "in 100,000 steps",
            peer=total[False][what] * 1e5 / steps,
            limit=limit,
            target=f"at most {limit:g}",
        )
        for what, limit in PAID.items()
    ]


def hurt(name: str, seed: int) -> tuple[float, float] | None:
    """Return after how many steps a sick training is found, and how many steps are lost; None: it is not found."""
    chance = np.random.default_rng(seed)
    at = int(chance.integers(1000, 1800))
    losses, norms = training(chance, at + 700, NOISES[seed % len(NOISES)])
    since = np.maximum(0.0, np.arange(len(losses)) - at)
    if name in SICK:
        losses = SICK[name](losses, since)
        norms = norms * np.exp(np.clip(since, 0, 20) / 4) if name.startswith("the gradient") else norms
        kind = Kind.LOSS_DIVERGENCE
    else:
        losses, kind = told(name, losses, since), Kind.LOSS_SPIKE
    _, findings = played(Curve(losses, norms), first=True)
    sick = (finding for finding in findings if finding.kind is kind and finding.seen > at)
    return next(((float(each.seen - at), float(each.seen - each.onset + 1)) for each in sick), None)


def of_sick(name: str, seeds: int, pool: Executor) -> list[Result]:
    seen = [each for each in pool.map(partial(hurt, name), range(seeds)) if each]
    late, lost, missed = [late for late, _ in seen], [lost for _, lost in seen], seeds - len(seen)
    steps = [
        Result(f"{name}: found after", median(late), "steps (median)"),
        Result(f"{name}: lost steps", median(lost), "steps (median)"),
    ]
    return [
        Result(
            f"{name}: not {'found' if name in SICK else 'told'}",
            missed / seeds,
            "share",
            limit=0.01,
            target="at most 0.01",
        ),
        *(steps if name in SICK else steps[:1]),
    ]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--curves", type=Path, help="directory with recorded curves of healthy trainings")
    parser.add_argument("--steps", type=count, default=12_000, help="steps of each synthetic healthy curve")
    parser.add_argument("--seeds", type=count, default=100, help="sick trainings of each kind")
    args = parser.parse_args()
    if args.steps < 4000:
        parser.error(f"--steps is {args.steps}; some of the healthy curves need at least 4000 steps")
    if args.curves and not args.curves.is_dir():
        parser.error(f"--curves {args.curves} is no directory")
    with ProcessPoolExecutor() as pool:
        results = of_healthy("recorded", [*recorded(args.curves)], pool) if args.curves else []
        results += of_healthy("synthetic", [*healthy(np.random.default_rng(1), args.steps)], pool)
        for name in (*SICK, *TOLD):
            results += of_sick(name, args.seeds, pool)
    report("judgement", results)


if __name__ == "__main__":
    main()
