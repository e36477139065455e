"""Finds the ranks that hold up the others, from what torch's flight recorders have recorded. Pure.

    a rank's recorder, in JSON ──summary──▶ GroupCalls for each process group ──line, read──▶ the agent ──judge──▶ which ranks, and why

All ranks of a group give a collective the same number. So the first collective that is not complete on some rank shows what went wrong:

    a rank has called another collective under that number    → mismatch
    a rank has not called it                                  → missing
    all have called it, and one device has not begun it       → that device is stuck
    all have called it, and it is complete on no rank         → a device or the link; it is not known which
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain
from typing import Any

from ..errors import InternalError
from ..model.collectives import GroupCalls
from ..model.types import Rank
from ..store.codec import dumps, loads
from ..text import formatting

_MARK = "flight recorder: "
_GROUPS, _WORD, _LINE = 64, 80, 1 << 16
"""The most groups in a summary, the most letters of a name, and the most letters of a summary. Summaries are short because a leader reads
those of all ranks."""
_ALL = "default_pg"
"""torch's name of the group of all ranks."""
_SIZED = ("all_reduce", "allreduce", "broadcast", "reduce", "_all_gather_base", "_reduce_scatter_base")
"""Collectives for which all ranks must give tensors of the same size."""


class Kind(StrEnum):
    MISMATCH = "mismatch"
    MISSING = "missing"
    DEVICE = "device"
    LINK = "link"


@dataclass(frozen=True, kw_only=True)
class Finding:
    kind: Kind
    ranks: tuple[Rank, ...] = ()
    """The ranks that hold up the others; empty: it is not known which ranks do."""
    sentence: str


@dataclass(frozen=True, kw_only=True)
class _Summary:
    calls: tuple[GroupCalls, ...]


# -- in the rank -----------------------------------------------------------------------------------------------------------


def summary(recorded: Iterable[str]) -> tuple[GroupCalls, ...]:
    """Return the calls in each process group. recorded: what `_dump_nccl_trace_json` and `_dump_fr_trace_json` return. Texts and entries of
    another form are skipped."""
    groups: dict[str, list[dict[str, Any]]] = {}
    members: dict[str, Any] = {}
    for text in recorded:
        try:
            content = json.loads(text)
            told = [*content.get("entries", ())]
            config = {**content.get("pg_config", {})}
        except (ValueError, TypeError, AttributeError, RecursionError):
            continue
        for each in told:
            if isinstance(each, dict) and _group(each)[0]:
                groups.setdefault(_group(each)[0], []).append(each)
        members |= {name: each.get("ranks", "") for name, each in config.items() if isinstance(each, dict)}
    found = [_calls(name, told, members.get(name, "")) for name, told in groups.items()]
    return tuple(each for each in found if each)[:_GROUPS]


def line(calls: Sequence[GroupCalls]) -> str:
    """Return the summary as one line of text, which `read` finds among others."""
    return _MARK + dumps(_Summary(calls=tuple(calls))).decode()


def read(text: str) -> tuple[GroupCalls, ...]:
    """Return the last summary in the text; empty: there is none."""
    said = next((each for each in reversed(text.splitlines()) if each.startswith(_MARK)), "")
    try:
        return loads(_Summary, said.removeprefix(_MARK)).calls if len(said) < _LINE else ()
    except InternalError:  # there is none, the rank was ended while it wrote, or other code wrote there
        return ()


def _group(entry: Mapping[str, Any]) -> tuple[str, str]:
    match entry.get("process_group"):
        case [str(name), str(about), *_]:
            return name[:_WORD], about[:_WORD]
    return "", ""


def _spans(text: Any) -> tuple[tuple[int, int, int], ...]:
    """Return the ranks in a text such as `[0, 1]`, as arguments of `range`. A few ranges suffice, because thousands of ranks are mostly
    evenly spaced."""
    found: list[tuple[int, int, int]] = []
    for rank in sorted({int(word) for word in str(text).strip("[]").split(",") if word.strip().isdecimal()}):
        start, stop, stride = found[-1] if found else (0, 0, 0)
        if found and (stop - start == 1 or rank == stop - 1 + stride):
            found[-1] = start, rank + 1, rank - (stop - 1)
        else:
            found.append((rank, rank + 1, 1))
    return (*found,)


def _calls(name: str, told: Sequence[Mapping[str, Any]], ranks: Any) -> GroupCalls | None:
    numbers = [(e.get("collective_seq_id"), e) for e in told if not e.get("is_p2p")]
    numbered = [(number, e) for number, e in numbers if isinstance(number, int)]
    if not numbered:
        return None
    waiting = [(number, e) for number, e in numbered if e.get("state") != "completed" and not e.get("retired")]
    number, first = min(waiting, key=lambda each: each[0], default=(0, {}))
    timed = any(e.get("time_discovered_started_ns") for e in told)
    about = _group(told[-1])[1]
    return GroupCalls(
        group=name,
        about=about,
        spans=_spans(ranks) if waiting and about != _ALL else (),
        last=max(number for number, _ in numbered),
        open=number,
        call=_call(first) if waiting else "",
        started=first.get("state") == "started" if waiting and timed else None,
    )


def _call(entry: Mapping[str, Any]) -> str:
    name = str(entry.get("profiling_name", "")).rpartition(":")[2][:_WORD]
    sizes, types = entry.get("input_sizes"), entry.get("input_dtypes")
    if name not in _SIZED or not isinstance(sizes, list) or not isinstance(types, list):
        return name
    shapes = ["x".join(map(str, size)) if isinstance(size, list) else str(size) for size in sizes]
    of = ", ".join(f"{shape or 1} {kind}" for shape, kind in zip(shapes, map(str, types), strict=False))
    return f"{name} of {of}"[: 2 * _WORD] if of else name


# -- in the leader ---------------------------------------------------------------------------------------------------------


def judge(told: Mapping[Rank, Sequence[GroupCalls]], ranks: Collection[Rank]) -> Finding | None:
    """Return which collective the ranks do not complete, and why; None: no collective is open, or no recorder shows the reason. told: for
    each rank that has a recorder, its groups. ranks: all ranks of the job. A rank that is missing because it waits in another group is not
    to blame: the finding then names no rank."""
    groups: dict[str, dict[Rank, GroupCalls]] = {}
    for rank, calls in told.items():
        for each in calls:
            groups.setdefault(each.group, {})[rank] = each
    # Of two groups with the same name, the spans tell which one a rank waits in.
    waited = dict.fromkeys(
        (each.group, each.about, each.spans) for calls in told.values() for each in calls if each.open
    )
    found, every, end = [], {*ranks}, max(ranks, default=-1) + 1
    for name, about, spans in waited:
        some = (range(max(0, start), min(stop, end), max(1, stride)) for start, stop, stride in spans)
        members = every if about == _ALL else every.intersection(chain(*some))
        own = {rank: groups[name][rank] for rank in members or groups[name] if rank in groups[name]}
        own = {rank: each for rank, each in own.items() if each.spans in ((), spans)}
        found += [part] if (part := _part(own, members, told, ranks)) else []
    order = [*Kind]

    def waits(finding: Finding) -> bool:
        return finding.kind is Kind.MISSING and any(each.open for rank in finding.ranks for each in told[rank])

    found = [replace(each, ranks=()) if waits(each) else each for each in found]
    return min(
        found, key=lambda each: (each.kind is not Kind.MISMATCH, not each.ranks, order.index(each.kind)), default=None
    )


def _part(
    calls: Mapping[Rank, GroupCalls], members: Set[Rank], told: Collection[Rank], ranks: Collection[Rank]
) -> Finding | None:
    """Return which collective of one group is not completed, and why. calls: by rank; members: the group's ranks; empty: not known; told:
    the ranks that have a recorder; ranks: all ranks."""
    number = min((each.open for each in calls.values() if each.open), default=0)
    if not number:
        return None
    at = {rank: each for rank, each in calls.items() if each.open == number}
    first = next(iter(at.values()))
    where = _name(members or {*calls}, ranks)
    by_call: dict[str, list[Rank]] = {}
    for rank, each in sorted(at.items()):
        by_call.setdefault(each.call, []).append(rank)
    if len(by_call) > 1:
        most = max(by_call.values(), key=len)
        few = sorted({*at} - {*most}) if 2 * len(most) > len(at) else []
        does = ", and ".join(f"{formatting.ranks(who)} called {call}" for call, who in by_call.items())
        return Finding(
            kind=Kind.MISMATCH, ranks=tuple(few), sentence=f"the ranks differ at collective {number} of {where}: {does}"
        )
    whose = f"collective {number} of {where} ({first.call})"
    missing = sorted(rank for rank in members if rank in told and (rank not in calls or calls[rank].last < number))
    if missing:
        verb = "has" if len(missing) == 1 else "have"
        return Finding(
            kind=Kind.MISSING,
            ranks=tuple(missing),
            sentence=f"{formatting.ranks(missing)} {verb} not called {whose}, in which {formatting.ranks(sorted(at))} "
            f"{'waits' if len(at) == 1 else 'wait'}",
        )
    behind = sorted(rank for rank, each in at.items() if each.started is False)
    if behind and len(behind) < len(at):
        whom = "device" if len(behind) == 1 else "devices"
        return Finding(
            kind=Kind.DEVICE,
            ranks=tuple(behind),
            sentence=f"the {whom} of {formatting.ranks(behind)} did not reach {whose}, which the other devices have begun: work "
            "that was queued before it does not end",
        )
    if not members or members - {*told}:
        return None
    return Finding(
        kind=Kind.LINK,
        sentence=f"{formatting.ranks(sorted(at))} called {whose}, as all ranks of the group did, and it does not complete: the link "
        "between them is gone, or work that was queued before it on a device does not end",
    )


def _name(members: Collection[Rank], ranks: Collection[Rank]) -> str:
    return "the group of all ranks" if {*members} >= {*ranks} else f"the group of {formatting.ranks(sorted(members))}"
