"""Checks a history against what this program promises (docs/chaos.md has the list): each check returns what it found wrong."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...resilience.text import formatting
from . import lines, pace
from .history import History, Run, Seen, Struck
from .plan import Kind

_STATE = "the final state has the bits of the run without faults"
_LINES = "it printed every result that the run without faults printed"
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
        Finding("training went on while etcd, the drain process or the disk was away", _stood_still(history)),
        Finding("nothing restarted because of a fault that training survives", _restarted(history)),
        Finding("no fault was named that nobody injected", _invented(history)),
        Finding("every snapshot on disk is complete, but for those that a fault damaged", _incomplete(history)),
        _left_over(history),
    ]


def violated(findings: Sequence[Finding]) -> tuple[str, ...]:
    """Return the promises that were not kept."""
    return tuple(finding.promise for finding in findings if finding.wrong)


def differs(findings: Sequence[Finding]) -> bool:
    """Return whether the final state or a printed line differs, which is no fault of a script that does not repeat."""
    return any(finding.wrong for finding in findings if finding.promise in (_STATE, _LINES))


def repeats(one: Run, other: Run) -> bool:
    """Return whether two runs with no fault ended with the same result."""
    return (one.digest, one.step) == (other.digest, other.step)


def _missed(history: History) -> tuple[str, ...]:
    return tuple(f"{each.injection}: {each.why_not}" for each in history.struck if each.why_not)


def _ended(history: History) -> tuple[str, ...]:
    code = history.faults.exit_code
    if history.unexpected or code == 0:
        return history.unexpected
    return (f"the last agent ended with exit code {code}",)


def _same_state(history: History) -> Finding:
    clean, came = history.clean, history.faults
    if not clean.digest:
        return Finding(_STATE, unknown="the script has no Session and no loop that is known, so no state was saved")
    if repeats(clean, came):
        return Finding(_STATE)
    if history.again and history.again.step != clean.step:
        return Finding(_STATE, unknown="two runs without faults end at different steps, so the script does not repeat")
    if history.again and came.step == clean.step and not repeats(clean, history.again):
        return Finding(_STATE, unknown="two runs without faults end with different bits, so the script does not repeat")
    if came.step != clean.step:
        return Finding(_STATE, (f"its last snapshot is of step {came.step}, without faults of step {clean.step}",))
    return Finding(_STATE, (f"SHA-256 {came.digest[:12]}…, without faults {clean.digest[:12]}…",))


def _same_lines(history: History) -> Finding:
    wanted = lines.stable(history.plain, history.clean)
    if history.again:
        wanted -= lines.missing(wanted, history.again.lines)
    if not wanted:
        why = "torchrun alone and mt-resilient print no equal line with a figure, so nothing can be compared"
        return Finding(_LINES, unknown=why)
    missing = list(lines.missing(wanted, history.faults.lines).elements())
    wrong = [f"missing: {line}" for line in missing[:_SHOWN]]
    if len(missing) > _SHOWN:
        wrong.append(f"and {len(missing) - _SHOWN} more of {wanted.total()} lines")
    return Finding(_LINES, tuple(wrong))


def _left_over(history: History) -> Finding:
    """What torchrun alone leaves, too, is the script's own. What only the run without faults leaves, no fault has caused."""
    always = lines.unusual(history.clean.left, history.plain.left)
    new = lines.unusual(history.faults.left, (*history.plain.left, *history.clean.left))
    unknown = f"without any fault, but not under torchrun alone, is left: {', '.join(always)}" if always else ""
    return Finding("nothing is left over: processes, shared memory, temporary files", new, unknown)


def records(history: History) -> list[Mapping[str, Any]]:
    """Return the generation records of the journal, in their order. `of`: the node whose journal has it."""
    found = [line for line in history.journal if line["kind"] == "generation"]
    return [{**line["record"], "of": line.get("of", "")} for line in found]


def _incidents(history: History) -> list[Mapping[str, Any]]:
    """Return each form of each incident of the journal, in their order."""
    return [line["incident"] for line in history.journal if line["kind"] == "incident"]


def _one_at_a_time(history: History) -> tuple[str, ...]:
    wrong: list[str] = []
    newest, members = dict[str, int](), dict[int, object]()
    forgotten = sum(each.kind.name == _FORGETS for each in history.struck)
    for record in records(history):
        of, number = record["of"], record["number"]
        before = newest.get(of, 0)  # each journal by itself: that of a leader which is cut off is read late
        fresh = number < before or members.get(number, record["members"]) != record["members"]
        if fresh and forgotten:  # without etcd's data, a new numbering begins above the snapshots on disk
            forgotten, before, members = forgotten - 1, 0, dict[int, object]()
        if number < before:
            wrong.append(f"generation {number} came after generation {before}")
        if members.setdefault(number, record["members"]) != record["members"]:
            wrong.append(f"generation {number} had other members later")
        newest[of] = max(before, number)
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
    damage = [each for each in history.struck if each.damaged or each.kind.corrupts]
    for number, record in starts.items():
        before = [each for each in history.struck if each.did and 0 < each.seen.generation == number - 1]
        if not before or record["onset"] >= 0:
            continue
        former = starts[number - 1]["members"] if number - 1 in starts else {}
        where, least = _kept(before, replaced=len({*former} - {*record["members"]}))
        excused = any(each.at_s <= before[-1].at_s and least <= _spoiled(each) for each in damage)
        if record["resume_step"] < least and not excused:
            cause = " and ".join(str(each.injection) for each in before)
            began = f"generation {number} began at step {record['resume_step']}, and step {least} was {where}"
            wrong.append(f"{cause}: {began}")
    return tuple(wrong)


def _spoiled(damage: Struck) -> float:
    """Return the newest step of a snapshot that the damage may have made wrong."""
    if damage.kind.found_late:
        return math.inf
    if damage.damaged:
        return int(damage.damaged.partition("-")[0])
    return 1 + max(*damage.seen.steps, damage.seen.memory_step, damage.seen.disk_step)


def _kept(before: Sequence[Struck], replaced: int) -> tuple[str, int]:
    """Return where the newest snapshot is that these faults have left, and its step. replaced: for how many nodes a spare came in, whose
    memory is out of reach, too."""
    disk = max(each.seen.disk_step for each in before)
    losses = max(replaced, sum(each.needs_copy for each in before))
    if any(each.needs_disk for each in before) or losses > 1:  # the copy may have been on the other node
        return "on disk", disk
    if losses:
        return "in other nodes' memory", max(disk, *(each.seen.copied_step for each in before))
    return "in memory", max(disk, *(each.seen.memory_step for each in before))


def _incomplete(history: History) -> tuple[str, ...]:
    """A start that meets an incomplete snapshot goes back to an older one, and sets it aside: only the journal tells of it at the end."""
    if any(each.damaged or each.kind.corrupts for each in history.struck):
        return history.damaged
    found = [each for each in _incidents(history) if each["cause"] == _UNUSABLE]
    met = [f"generation {each['generation']} could not use one" for each in found]
    return (*history.damaged, *dict.fromkeys(met))


def _invented(history: History) -> tuple[str, ...]:
    """A cause that no fault of the plan can have: the program itself has made replicas differ, or a node look lost."""
    injected = [each.kind for each in history.struck if each.did]
    wrong = [
        f"{each['cause']} in generation {each['generation']}"
        for each in _incidents(history)
        if each["cause"] in _EXPLAINS and not any(map(_EXPLAINS[each["cause"]], injected))
    ]
    return tuple(dict.fromkeys(wrong))


_UNUSABLE = "snapshot_unusable"
_EXPLAINS: Mapping[str, Callable[[Kind], bool]] = {
    "fingerprint_mismatch": lambda kind: kind.family == "inside" and (kind.corrupts or kind.name == "other_collective"),
    "cut_off": lambda kind: kind.parts_nodes,
    "agent_lost": lambda kind: kind.parts_nodes,
}
"""Whether a fault explains an incident of this cause."""
_FORGETS = "etcd_data_lost"
_MOVES_S = 4.5
"""A shorter pause shows nothing about progress: a busy machine has some, too."""


def _stood_still(history: History) -> tuple[str, ...]:
    """A pause is not blamed on a fault if the run without faults had one of half its length, nor while an earlier fault has no answer."""
    wrong = []
    most_s = max(_MOVES_S, 2 * (history.clean.pause_s + history.delay_s))
    for at, struck in enumerate(history.struck):
        if not struck.kind.goes_on or not struck.did or struck.seen.step < 0:
            continue
        during = [seen for seen in history.seen if struck.at_s <= seen.at_s <= struck.ended_s]
        others = [other for other in history.struck[:at] + history.struck[at + 1 :] if _overlap(struck, other)]
        harms = [each for each in history.struck[:at] if each.did and not each.kind.in_place]
        same = {seen.generation for seen in during} <= {struck.seen.generation}
        if same and not others and not _unanswered(harms, struck.seen.generation):
            pause_s = pace.pause_s(replace(struck.seen, at_s=struck.at_s), during, struck.ended_s, history.clean.step)
            if pause_s >= most_s:
                wrong.append(f"{struck.injection}: no step was finished for {formatting.seconds(pause_s)}")
    return tuple(wrong)


def _restarted(history: History) -> tuple[str, ...]:
    """A fault before is no excuse once its answer is there: a later generation, or none if it is survived, too. While no rank runs, as
    after the end of an agent, the generation that is seen is 0."""
    wrong = []
    done = [struck for struck in history.struck if struck.did]
    for at, struck in enumerate(done):
        until_s = done[at + 1].at_s if done[at + 1 :] else math.inf
        generation = struck.seen.generation
        ended = any(seen.generation > generation for seen in history.seen if struck.at_s <= seen.at_s < until_s)
        excused = _unanswered(done[:at], generation)
        replaced = struck.kind.slows_steps and history.spares > 0
        if struck.kind.survived and ended and not (excused or replaced):
            wrong.append(f"{struck.injection}: generation {generation} ended")
    return tuple(wrong)


def _unanswered(before: Sequence[Struck], generation: int) -> bool:
    """Return whether one of these faults, which training does not survive, may still end this generation."""
    harms = [each for each in before if not each.kind.survived]
    return any(each.seen.generation + each.kind.spoils_starts >= generation for each in harms)


def _overlap(one: Struck, other: Struck) -> bool:
    return other.did != "" and other.at_s <= one.ended_s and one.at_s - 10.0 <= max(other.at_s, other.ended_s)


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
