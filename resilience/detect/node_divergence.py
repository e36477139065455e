"""Whether nodes whose ranks are replicas of each other still hold the same bits. Pure.

    statuses (`Held`) ──▶ by model, snapshot by snapshot ──▶ `Parted`: since when they are apart, and which of them is wrong

A node compares its own ranks (`agent/snapshots/replica_check.py`); where they share one model (tensor- or pipeline-parallel) and its copies
are on other nodes, this is the only comparison. As there, it is learned: a finding means that the bits were the same, through TRUSTED
different values in a row, and are not any more. Nodes that hold something else on purpose are never believed to be alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from ..model.signals import Held, Parted, Snapshot
from ..model.types import NodeId, Step

TRUSTED = 4
"""Different values in a row, all alike: as for the ranks of one node (`checkpoint/format/replica_agreement.py`)."""
KEPT = 16
"""Snapshots that a node tells: so many as make up for a node that is some behind, and for some minutes in which etcd is away."""


MOST = 64
"""Different texts of one model: more are not told by replicas, of which most are at the same snapshot, nor read at each look."""


def parted(told: Mapping[NodeId, str]) -> list[Parted]:
    """What is apart among nodes that have told these texts of `Held`. Not yet known is what not all of them have told."""
    if len({hash(text) for text in told.values()}) < 2:  # which reads no text that it has read before
        return []
    alike = _alike(told)
    found = []
    for texts in _by_model(alike).values():
        if len({_last(text) for text in texts}) < len(texts):  # else they only have told more, or less, by now
            found.append(_apart(_groups(texts, alike)))
    return [each for each in found if each]


def compared(told: Mapping[NodeId, str]) -> tuple[list[list[NodeId]], list[NodeId]]:
    """Nodes that are known for replicas, by model; and those that have told as much of such a model, and hold something else."""
    alike = _alike(told)
    known, own = [], []
    for texts in _by_model(alike).values():
        groups = _groups(texts, alike)
        learned, *_ = _learn(groups)
        judged = [(words, nodes, number) for (words, nodes), number in zip(groups, learned, strict=True)]
        replicas = [node for _, nodes, number in judged if number >= TRUSTED for node in nodes]
        if len(replicas) > 1:
            known.append(sorted(replicas))
            own += [
                n for words, nodes, number in judged if not number and len({*words.values()}) >= TRUSTED for n in nodes
            ]
    return known, sorted(own)


_Group: TypeAlias = tuple[Mapping[Snapshot, int], list[NodeId]]
"""Nodes that have told the same."""


def _alike(told: Mapping[NodeId, str]) -> dict[str, list[NodeId]]:
    alike: dict[str, list[NodeId]] = defaultdict(list)
    for node, text in told.items():
        alike[text].append(node)
    return alike


def _by_model(texts: Iterable[str]) -> dict[str, list[str]]:
    models: dict[str, list[str]] = defaultdict(list)
    for text in texts:
        models[text.partition(" ")[0]].append(text)
    return {model: texts for model, texts in models.items() if len(texts) <= MOST}


def _last(text: str) -> str:
    """The last snapshot that it tells of, without its word."""
    return text.rpartition(" ")[2].rpartition(".")[0]


def _groups(texts: Iterable[str], alike: Mapping[str, list[NodeId]]) -> list[_Group]:
    return [(Held.parse(text).words, alike[text]) for text in texts]


def _learn(groups: Sequence[_Group]) -> tuple[list[int], Snapshot | None, list[list[NodeId]]]:
    """Of each, how many values in a row it has held as the others did, until some that are known for replicas are apart: at which snapshot,
    and who held the same there. Who is not known for one is believed nothing, and holds up nobody."""
    alike, last = [0] * len(groups), None
    for at in sorted(set[Snapshot]().union(*(words for words, _ in groups))):
        there = [n for n, (words, _) in enumerate(groups) if at in words]
        known = [n for n in there if alike[n] >= TRUSTED]
        by_word: dict[int, list[NodeId]] = defaultdict(list)
        for n in known or there:
            by_word[groups[n][0][at]] += groups[n][1]
        if len(by_word) > 1 and known:
            return alike, at, [*by_word.values()]
        most, *others = sorted(by_word.items(), key=lambda each: -len(each[1]))
        held = most[0] if known or (len(most[1]) > 1 and not (others and len(others[0][1]) == len(most[1]))) else None
        for n in there:
            alike[n] = alike[n] + (held != last) if groups[n][0][at] == held else 0
        last = held
    return alike, None, []


def _apart(groups: Sequence[_Group]) -> Parted | None:
    """None as long as one that is known for a replica has not told so far, or where there is no snapshot at which all of them agreed."""
    alike, at, parts = _learn(groups)
    if at is None:
        return None
    known = [told for (told, _), number in zip(groups, alike, strict=True) if number >= TRUSTED]
    words = [told for told in known if at in told]
    together = [each for each in set.intersection(*({*each} for each in words)) if each < at]
    agreed = max((each for each in together if len({told[each] for told in words}) == 1), default=None)
    if agreed is None or any(max(told) < at for told in known):
        return None
    everybody, most = sorted(node for part in parts for node in part), max(parts, key=len)
    right = {*most} if 2 * len(most) > len(everybody) else {*everybody}
    return Parted(
        agreed=Step(agreed[-1]),
        seen=at,
        nodes=tuple(everybody),
        wrong=tuple(node for node in everybody if node not in right),
    )
