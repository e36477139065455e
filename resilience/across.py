"""Whether nodes whose ranks are replicas of each other still hold the same bits. Pure.

    statuses (`Held`) ──▶ by model, snapshot by snapshot ──▶ `Parted`: since when they are apart, and which of them is wrong

A node compares its own ranks (`agent/replicas.py`); where they share one model (tensor- or pipeline-parallel) and its copies are on
other nodes, this is the only comparison. As there, it is learned: a finding means that the bits were the same, through TRUSTED different
values in a row, and are not any more. Nodes that hold something else on purpose are never believed to be alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from .terms import NodeId, Step

TRUSTED = 4
"""Different values in a row, all alike: as for the ranks of one node (`checkpoint/agreement.py`)."""
KEPT = 16
"""Snapshots that a node tells: so many as make up for a node that is some behind, and for some minutes in which etcd is away."""


MOST = 64
"""Different texts of one model: more are not told by replicas, of which most are at the same snapshot, nor read at each look."""

Snapshot: TypeAlias = tuple[int, ...]
"""Generation, rewinds and step: ordered as they were taken."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """What the ranks of a node have held at the last snapshots that all nodes look at: what goes to disk or into another node's memory. Its
    text is a word each: whoever leads hears that of thousands of nodes at a time, mostly the same, and reads what differs."""

    model: str
    """Equal on nodes whose ranks, one by one, are replicas of each other."""
    words: Mapping[Snapshot, int]
    """One number for the bits of all ranks."""

    def __str__(self) -> str:
        return " ".join((self.model, *(".".join(map(str, (*at, word))) for at, word in sorted(self.words.items()))))

    @classmethod
    def parse(cls, text: str) -> Held:
        model, *words = text.split(" ")
        found = [[*map(int, word.split("."))] for word in words]
        return cls(model=model, words={(*at,): word for *at, word in found})


@dataclass(frozen=True, kw_only=True)
class Parted:
    """Nodes that held the same bits at one snapshot, and did not at the next one that all of them have told."""

    agreed: Step
    """The former,"""
    seen: Snapshot
    """and the latter."""
    nodes: tuple[NodeId, ...]
    """That should hold the same,"""
    wrong: tuple[NodeId, ...] = ()
    """and of these the ones that differ from more than half; none: there is no such majority."""


def parted(told: Iterable[tuple[NodeId, str]]) -> list[Parted]:
    """What is apart among nodes that have told these texts of `Held`. Not yet known is what not all of them have told."""
    alike: dict[str, list[NodeId]] = defaultdict(list)
    for node, text in told:
        alike[text].append(node)
    models: dict[str, list[str]] = defaultdict(list)
    for text in alike:
        models[text.partition(" ")[0]].append(text)
    found = (
        _compare([(Held.parse(each), alike[each]) for each in texts])
        for texts in models.values()
        if 1 < len(texts) <= MOST
    )
    return [each for each in found if each]


def _compare(variants: Sequence[tuple[Held, list[NodeId]]]) -> Parted | None:
    """variants: what some nodes have told alike."""
    variants = [each for each in variants if len(each[0].words) > TRUSTED]
    if len(variants) < 2:
        return None
    alike, last, agreed = 0, -1, -1
    for at in sorted(set.intersection(*({*held.words} for held, _ in variants))):
        by_word: dict[int, list[NodeId]] = defaultdict(list)
        for held, nodes in variants:
            by_word[held.words[at]] += nodes
        if len(by_word) > 1 and alike >= TRUSTED:
            everybody = [node for nodes in by_word.values() for node in nodes]
            most = max(by_word.values(), key=len)
            wrong = [node for node in everybody if node not in {*most}] if 2 * len(most) > len(everybody) else []
            return Parted(
                agreed=Step(agreed),
                seen=at,
                nodes=tuple(sorted(everybody)),
                wrong=tuple(sorted(wrong)),
            )
        [word] = by_word if len(by_word) == 1 else [-1]
        alike = 0 if word < 0 else alike + (word != last)
        last, agreed = word, at[-1]
    return None
