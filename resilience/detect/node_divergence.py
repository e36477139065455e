"""Finds nodes whose ranks are replicas of each other, but no longer hold the same bits. Pure.

    statuses (`Held`) ──▶ by model, snapshot by snapshot ──▶ `Parted`: since when nodes differ, and which nodes are wrong

Each node compares its own ranks (`agent/snapshots/replica_check.py`). If its ranks share one model (tensor- or pipeline-parallel), the
replicas are on other nodes, and the comparison of this module is the only one. Both comparisons learn which nodes or ranks are replicas:
those that held the same bits through TRUSTED different values in a row. A finding means that known replicas no longer hold the same bits.
Nodes that hold something else on purpose never count as replicas.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from ..model.signals import Held, Parted, Snapshot
from ..model.types import NodeId, Step

TRUSTED = 4
"""Nodes count as replicas after this many different values in a row were equal. The ranks of one node count as replicas after as many
(`checkpoint/format/replica_ledger.py`)."""
KEPT = 16
"""Number of snapshots that a node reports. So many suffice if another node is some snapshots behind, or etcd does not answer for some
minutes."""


MOST = 64
"""If nodes report more different texts (`Held`) of a model than this, the model is not compared. Most replicas are at the same snapshot, so
they report fewer different texts."""


def parted(told: Mapping[NodeId, str]) -> list[Parted]:
    """Return the divergences among nodes that reported these texts of `Held`. A divergence is found once all replicas have reported the
    snapshot at which they differ."""
    if len({hash(text) for text in told.values()}) < 2:  # a string caches its hash, so no text is read twice
        return []
    alike = _alike(told)
    found = []
    for texts in _by_model(alike).values():
        if len({_last(text) for text in texts}) < len(texts):  # otherwise, some nodes have only reported more snapshots
            found.append(_apart(_groups(texts, alike)))
    return [each for each in found if each]


def compared(told: Mapping[NodeId, str]) -> tuple[list[list[NodeId]], list[NodeId]]:
    """Return the known replicas, a list for each model. Also return the nodes whose bits differ from these replicas of their model although
    the nodes reported TRUSTED different values or more."""
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
"""One report, as a number for the bits of each snapshot; and the nodes that made this report."""


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
    """Return the last snapshot in the text, without the number for its bits."""
    return text.rpartition(" ")[2].rpartition(".")[0]


def _groups(texts: Iterable[str], alike: Mapping[str, list[NodeId]]) -> list[_Group]:
    return [(Held.parse(text).words, alike[text]) for text in texts]


def _learn(groups: Sequence[_Group]) -> tuple[list[int], Snapshot | None, list[list[NodeId]]]:
    """Return for each group how many different values in a row it held in common with the others. If known replicas diverge, also return
    the snapshot at which they do, and lists of the nodes that held the same bits there. Nodes not yet known as replicas are ignored and
    never block a verdict."""
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
    """Return how the groups diverge. None: they do not diverge; or a known replica has not yet reported the snapshot; or the replicas
    agreed at no earlier snapshot."""
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
