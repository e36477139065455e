"""What a seed chooses: the faults of a plan without a file, and the ranks and steps that a plan leaves open."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar

from ...resilience.errors import UsageError
from ...resilience.model.incident import PHASES
from .plan import ANY, Injection, Kind, Plan

_FOLLOWING = 0.3
"""The share of faults that strike shortly after another, or amid its recovery."""
_FIRST, _LAST = 0.15, 0.75
"""The shares of the training between which faults strike: before, there is no snapshot; after, no time to recover."""


def drawn(seed: int, number: int, kinds: Iterable[Kind], spares: int = 0) -> Plan:
    """Return the plan of `number` faults that the seed stands for. spares: nodes that stand by. If the killed agent is one of them, there
    is no recovery in which a fault could follow."""
    dice = random.Random(f"faults {seed}")
    families: dict[str, list[Kind]] = {}
    for kind in sorted((kind for kind in kinds if kind.seeded), key=lambda kind: (kind.family, kind.name)):
        families.setdefault(kind.family, []).append(kind)
    injections: list[Injection] = []
    while len(injections) < number:
        kind = dice.choice(families[dice.choice([*families])])
        injection = Injection(fault=kind.name, for_s=kind.lasts_s)
        if injections and dice.random() < _FOLLOWING:
            phase, after_s = dice.choice(PHASES), round(dice.uniform(0.0, 1.0), 2)
            restarts = injections[-1].fault in ("rank_killed", "rank_segfaults", *([] if spares else ["agent_killed"]))
            following = {"phase": phase} if restarts and dice.random() < 0.6 else {"after_s": after_s}
            injection = replace(injection, **following)  # type: ignore[arg-type]
        injections.append(injection)
    return Plan(injections=tuple(injections), seed=seed)


def settled(plan: Plan, ranks: int, steps: int, kinds: dict[str, Kind], nodes: int = 1) -> Plan:
    """Return the plan with each rank, node and step chosen, in the order in which the faults strike. steps: how many the training has.
    Raises UsageError if a fault comes after its end."""
    dice = random.Random(f"moments {plan.seed}")
    groups: list[tuple[int, list[Injection]]] = []
    for each in plan.injections:
        if each.step >= steps:
            raise UsageError(
                f"the plan cannot be used: {each.fault} strikes at step {each.step}, and the training has only {steps}; no fault was "
                "injected"
            )
        kind = kinds[each.fault]
        rank = dice.randrange(ranks) if each.rank == ANY and kind.of_a_rank else each.rank
        node = dice.randint(1, nodes) if each.node == ANY and kind.of_a_node and nodes > 1 else each.node
        step = dice.randint(max(1, int(_FIRST * steps)), max(1, int(_LAST * steps)))
        if each.follows and groups:
            groups[-1][1].append(replace(each, rank=rank, node=node))
        else:
            step = each.step if each.step != ANY else step
            groups.append((step, [replace(each, rank=rank, node=node, step=step)]))
    groups.sort(key=lambda group: group[0])
    return replace(plan, injections=tuple(each for _, group in groups for each in group))


def delay_s(faults: int, steps: int, took_s: float, least_s: float) -> float:
    """Return for how long each step is held up, so that the training lasts long enough for all its faults. took_s: how long it takes by
    itself. least_s: how long it should last for each fault."""
    return round(max(0.0, faults * least_s - took_s) / max(1, steps), 3)


T = TypeVar("T")


def shrunk(items: tuple[T, ...], fails: Callable[[tuple[T, ...]], bool]) -> tuple[T, ...]:
    """Return as few of `items`, in their order, as still fail: leaving out any further one does not. fails: tries a shorter tuple."""
    for place in reversed(range(len(items))):
        smaller = items[:place] + items[place + 1 :]
        if fails(smaller):
            return shrunk(smaller, fails)
    return items
