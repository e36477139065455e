"""Checks a history against what this program promises (docs/chaos.md has the list): each check returns what it found wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...resilience.text import formatting
from .history import History, Run, Seen, Struck

_SHOWN = 3
"""The most wrong lines that a finding quotes."""


@dataclass(frozen=True)
class Finding:
    promise: str
    wrong: tuple[str, ...] = ()
    unknown: str = ""
    """Why it could not be checked; empty: it was."""


def checked(history: History) -> list[Finding]:
    """Return a finding for each promise, in the order in which the result shows them."""
    return [
        Finding("every fault of the plan struck", _missed(history)),
        Finding("the job reached its end with exit code 0", _ended(history)),
        _same_state(history),
        _same_lines(history),
        Finding("no two generations of ranks worked at once, and their numbers only rose", _one_at_a_time(history)),
        Finding("ranks never started from a state that was known to be wrong", _suspected(history)),
        Finding("no more steps were lost than the newest snapshot was old", _lost(history)),
        Finding("training went on while etcd or the drain process was away", _stood_still(history)),
        Finding("every snapshot on disk is complete, but for those that a fault damaged", history.damaged),
        Finding("nothing is left over: processes, shared memory, temporary files", history.left_over),
    ]


def violated(findings: Sequence[Finding]) -> tuple[str, ...]:
    """Return the promises that were not kept."""
    return tuple(finding.promise for finding in findings if finding.wrong)


def stable(one: Run, other: Run) -> Counter[str]:
    """Return the lines with a figure that both runs printed. Times and speeds differ from run to run, and drop out."""
    return Counter(filter(_has_figure, one.lines)) & Counter(filter(_has_figure, other.lines))


def repeats(one: Run, other: Run) -> bool:
    """Return whether two runs with no fault ended with the same result."""
    return (one.digest, one.step) == (other.digest, other.step)


def _has_figure(line: str) -> bool:
    return any(letter.isdigit() for letter in line)


def _missed(history: History) -> tuple[str, ...]:
    return tuple(f"{each.injection}: {each.why_not}" for each in history.struck if not each.did)


def _ended(history: History) -> tuple[str, ...]:
    code = history.faults.exit_code
    if history.unexpected or code == 0:
        return history.unexpected
    return (f"the last agent ended with exit code {code}",)


def _same_state(history: History) -> Finding:
    promise = "the final state has the bits of the run without faults"
    clean, came = history.clean, history.faults
    if not clean.digest:
        return Finding(promise, unknown="the script has no Session and no loop that is known, so no state was saved")
    if repeats(clean, came):
        return Finding(promise)
    if history.again and not repeats(clean, history.again):
        return Finding(
            promise, unknown="two runs without faults end with different bits, so the script does not repeat"
        )
    if came.step != clean.step:
        return Finding(promise, (f"its last snapshot is of step {came.step}, without faults of step {clean.step}",))
    return Finding(promise, (f"SHA-256 {came.digest[:12]}…, without faults {clean.digest[:12]}…",))


def _same_lines(history: History) -> Finding:
    promise = "it printed every result that the run without faults printed"
    wanted = stable(history.plain, history.clean)
    if history.again:
        wanted &= Counter(history.again.lines)
    if not wanted:
        why = "torchrun alone and mt-resilient print no equal line with a figure, so nothing can be compared"
        return Finding(promise, unknown=why)
    missing = list((wanted - Counter(history.faults.lines)).elements())
    wrong = [f"missing: {line}" for line in missing[:_SHOWN]]
    if len(missing) > _SHOWN:
        wrong.append(f"and {len(missing) - _SHOWN} more of {wanted.total()} lines")
    return Finding(promise, tuple(wrong))


def records(history: History) -> list[Mapping[str, Any]]:
    """Return the generation records of the journal, in their order."""
    return [line["record"] for line in history.journal if line["kind"] == "generation"]


def _one_at_a_time(history: History) -> tuple[str, ...]:
    wrong: list[str] = []
    newest, members = 0, dict[int, object]()
    forgotten = sum(each.injection.fault == _FORGETS for each in history.struck)
    for record in records(history):
        number = record["number"]
        if number < newest and forgotten:  # without etcd's data, a new numbering begins above the snapshots on disk
            forgotten, newest, members = forgotten - 1, 0, dict[int, object]()
        if number < newest:
            wrong.append(f"generation {number} came after generation {newest}")
        if members.setdefault(number, record["members"]) != record["members"]:
            wrong.append(f"generation {number} had other members later")
        newest = max(newest, number)
    overlaps = [seen.overlap for seen in history.seen if seen.overlap]
    return tuple(dict.fromkeys((*wrong, *overlaps)))


def _suspected(history: History) -> tuple[str, ...]:
    found = {
        record[
            "number"
        ]: f"generation {record['number']} began at step {record['resume_step']}, and step {record['onset']} was wrong"
        for record in records(history)
        if 0 <= record["onset"] <= record["resume_step"]
    }
    return tuple(found.values())


def _lost(history: History) -> tuple[str, ...]:
    """A restart after a death must not begin before the snapshot that was there. Where a rank's state was wrong, or a snapshot is damaged,
    an older one is right."""
    wrong = []
    launches = [record for record in records(history) if record["phase"] == "launch"]
    times = Counter(record["number"] for record in launches)
    starts = {record["number"]: record for record in launches if times[record["number"]] == 1}
    damage = [each.at_s for each in history.struck if each.damaged or each.injection.fault in _DAMAGING]
    for number, record in starts.items():
        before = [each for each in history.struck if each.did and each.seen.generation == number - 1]
        if not before or record["onset"] >= 0 or any(at_s <= before[-1].at_s for at_s in damage):
            continue
        from_disk = any(each.needs_disk for each in before)
        least = max(
            each.seen.disk_step if from_disk else max(each.seen.disk_step, each.seen.memory_step) for each in before
        )
        if record["resume_step"] < least:
            where = "on disk" if from_disk else "in memory"
            cause = " and ".join(str(each.injection) for each in before)
            began = f"generation {number} began at step {record['resume_step']}, and step {least} was {where}"
            wrong.append(f"{cause}: {began}")
    return tuple(wrong)


_DAMAGING = {
    "memory_flipped",
    "nan_in_gradient",
    "inf_in_gradient",
    "bit_in_parameter",
    "bit_in_gradient",
    "bit_in_moment",
}
_FORGETS = "etcd_data_lost"
_HELPERS = ("etcd_stopped", "etcd_killed", "drain_killed", "drain_stopped", "warm_killed")
_MOVES_S = 2.0
"""A fault of a helper that lasts for less shows nothing about progress."""


def _stood_still(history: History) -> tuple[str, ...]:
    wrong = []
    for at, struck in enumerate(history.struck):
        if struck.injection.fault not in _HELPERS or struck.ended_s - struck.at_s < _MOVES_S:
            continue
        others = [other for other in history.struck[:at] + history.struck[at + 1 :] if _overlap(struck, other)]
        during = [seen for seen in history.seen if struck.at_s <= seen.at_s <= struck.ended_s]
        same = {seen.generation for seen in during} == {struck.seen.generation}
        if during and same and not others and during[-1].step <= struck.seen.step:
            lasted = formatting.seconds(struck.ended_s - struck.at_s)
            wrong.append(f"{struck.injection}: no step was finished for {lasted}")
    return tuple(wrong)


def _overlap(one: Struck, other: Struck) -> bool:
    return other.did != "" and one.at_s - 10.0 <= other.at_s <= one.ended_s


def phase(record: Mapping[str, Any] | None, before: int, seen: Seen, marks: Mapping[str, bool]) -> str:
    """Return the phase of the recovery from a fault of generation `before`; empty: it is over. record: the newest generation record. marks:
    for each of `attached`, `built`, `restored`, `stepped`, whether all ranks of `seen` have come so far."""
    if record is None or record["number"] <= before:
        return "detect"
    if record["phase"] == "gather" or seen.generation < record["number"]:
        return "stop"
    for mark, name in (("attached", "start"), ("built", "build"), ("restored", "restore"), ("stepped", "step")):
        if not marks[mark]:
            return name
    return "replay" if seen.step < record["replay_until"] else ""
