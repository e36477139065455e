"""What `race.py` makes of its measurements: the outcome of a fault, the results, and the tables and the picture of docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from measure import Result, median

FAULTS = {
    "kill": "SIGKILL of a rank",
    "hang": "SIGSTOP of a rank",
    "nan": "NaN in a gradient of one rank",
    "agent": "SIGKILL of one node's launcher",
    "node": "all processes of one node killed",
}
FLOOR_S, CONFIRM_S, FACTOR = 60.0, 20.0, 3.0
"""`hang.floor_s`; what a hang may take beyond it; a step is held up if it takes this many times the usual time."""
COPIES_S = 1.0
"""Seconds between the copies that our nodes make of each other's snapshots (`copies.every_s` in systems.toml)."""
_TEXT = {
    "kill": ("<= 0.1 x torchrun", "<= 0.25 x the best other"),
    "hang": f"<= {FLOOR_S:.0f} + {CONFIRM_S:.0f} s",
    "nan": "<= 0.2 s + the steps computed again",
}


@dataclass(frozen=True)
class Outcome:
    """What one fault cost."""

    first_s: float | None
    """Seconds from the fault to the first step that is new; None: it did not come."""
    lost_s: float | None = None
    """Seconds by which the training is behind, for this fault."""
    again: int = 0
    """Steps done before that were computed again."""
    alone: int = 0
    """New steps that fewer ranks computed."""
    step_s: float = 0.0
    """The usual duration of a step."""


def outcome(steps: Iterable[tuple[float, int, int, int]], fault_s: float, ranks: int) -> Outcome:
    """Return what a fault cost. steps: when, by which rank, and which step was done, and how many ranks took part; each in order. A new
    step that its rank does again, because it was poisoned, counts as done then."""
    newest, new, again = -1, [], set()
    of: dict[int, int] = {}
    steps = list(steps)
    final = {(rank, step): at_s for at_s, rank, step, _ in steps}
    top = max((step for at_s, _, step, _ in steps if at_s <= fault_s), default=-1)
    for at_s, rank, step, took_part in steps:
        if step > top and at_s < final[rank, step]:
            continue
        if at_s > fault_s and step <= of.get(rank, -1):
            again.add(step)
        elif at_s <= fault_s:
            of[rank] = max(step, of.get(rank, -1))
        if step > newest:
            newest = step
            new.append((at_s, took_part))
    before = [at_s for at_s, _ in new if at_s <= fault_s]
    after = [one for one in new if one[0] > fault_s]
    usual = median([later - at_s for at_s, later in pairwise(before[-31:])]) or 0.0
    if not after or not before:
        return Outcome(None, step_s=usual)
    came = [before[-1], *(at_s for at_s, _ in after)]
    gaps = [later - at_s for at_s, later in pairwise(came)]
    lost = sum(gap - usual for gap in gaps if gap > FACTOR * usual)
    alone = sum(took_part < ranks for _, took_part in after)
    return Outcome(after[0][0] - fault_s, lost, len(again), alone, usual)


Runs = Mapping[str, Mapping[str, Any]]
"""By "SYSTEM FAULT": `outcomes` (of `Outcome` as dictionaries), `phases`, `equal`, `note`."""


def saved(found: Sequence[Outcome]) -> list[dict[str, Any]]:
    return [asdict(one) for one in found]


def middle(runs: Runs, system: str, fault: str, figure: str = "first_s") -> float | None:
    """Return the median of a figure; None if the system did not always recover."""
    values = [one[figure] for one in runs.get(f"{system} {fault}", {}).get("outcomes", [])]
    return None if None in values else median(values)


def results(runs: Runs, systems: Sequence[str], every: int) -> list[Result]:
    """Return the targets, and then each system's figures."""
    ours = [name for name in systems if name.startswith("ours")]
    peers = [name for name in systems if name not in ours]
    rows = []
    if "ours-warm kill" in runs:
        kill = middle(runs, "ours-warm", "kill")
        others = [value for name in peers if name != "torchrun" and (value := middle(runs, name, "kill")) is not None]
        for peer, share, text in (
            (middle(runs, "torchrun", "kill"), 0.1, _TEXT["kill"][0]),
            (min(others, default=None), 0.25, _TEXT["kill"][1]),
        ):
            rows.append(Result("kill to first new step, warm", kill, "s", peer, peer and share * peer, text))
    for name in ours:
        for fault in FAULTS:
            if run := runs.get(f"{name} {fault}"):
                came = middle(runs, name, fault) is not None
                again = max(one["again"] for one in run["outcomes"]) if came else None
                target, limit = f"<= the snapshot's age, at most {every}, + 1", every + 1.0
                if fault in ("agent", "node"):
                    target = f"<= the copy's age, at most {every} steps + {COPIES_S:g} s, + 1"
                    limit += COPIES_S / min(one["step_s"] for one in run["outcomes"])
                rows.append(Result(f"{fault}, steps computed again, {name}", again, "steps", None, limit, target))
        if detect := runs.get(f"{name} hang", {}).get("phases", {}).get("detect"):
            rows.append(Result(f"hang, until detected, {name}", detect, "s", None, FLOOR_S + CONFIRM_S, _TEXT["hang"]))
        if found := runs.get(f"{name} nan", {}).get("outcomes"):
            limit = 0.2 + max((one["again"] + 2) * one["step_s"] for one in found)
            rows.append(
                Result(f"nan to first new step, {name}", middle(runs, name, "nan"), "s", None, limit, _TEXT["nan"])
            )
    for fault in FAULTS:
        for name in systems:
            if f"{name} {fault}" in runs:
                rows.append(Result(f"{fault}, first new step, {name}", middle(runs, name, fault), "s"))
                rows.append(Result(f"{fault}, lost, {name}", middle(runs, name, fault, "lost_s"), "s"))
    return rows


def table(runs: Runs, fault: str, labels: Mapping[str, str]) -> str:
    """Return the table of one fault."""
    lines = [
        "| | first new step | time lost | steps computed again | bits | faults | |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, label in labels.items():
        if not (run := runs.get(f"{name} {fault}")):
            continue
        found = run["outcomes"]
        came = [one for one in found if one["first_s"] is not None]
        first, lost, again = (_spread([one[figure] for one in came], unit) for figure, unit in _FIGURES)
        equal = {True: "equal", False: "differ", None: "-"}[run.get("equal")]
        alone = sum(one["alone"] for one in found)
        notes = [run.get("note", ""), f"{alone} steps by fewer ranks" if alone else ""]
        notes += [f"{len(found) - len(came)} without recovery" if came and len(came) < len(found) else ""]
        lines.append(
            f"| {label} | {first} | {lost} | {again} | {equal} | {len(found)} | {'; '.join(filter(None, notes))} |"
        )
    return "\n".join(lines)


_FIGURES = (("first_s", " s"), ("lost_s", " s"), ("again", ""))


def _spread(values: Sequence[float], unit: str) -> str:
    """Return the median, and the range if there is one."""
    if not values:
        return "-"
    low, high = min(values), max(values)
    return f"**{median(values):.3g}{unit}**" + (f" ({low:.3g} to {high:.3g})" if low < high else "")


PHASES = ("detect", "decide", "stop", "start", "build", "restore", "step", "replay")


def phases(runs: Runs, labels: Mapping[str, str]) -> str:
    """Return the table of our recoveries by phase."""
    rows = [
        f"| {labels[name]}, {fault} | " + " | ".join(f"{found[p]:.3f}" if p in found else "-" for p in PHASES) + " |"
        for name in labels
        for fault in FAULTS
        if (found := runs.get(f"{name} {fault}", {}).get("phases"))
    ]
    return "\n".join([f"| s | {' | '.join(PHASES)} |", "|---" * (len(PHASES) + 1) + "|", *rows])


def targets(found: Iterable[Result]) -> str:
    rows = []
    for one in [one for one in found if one.target]:
        met = "met" if one.met else "**missed**"
        rows.append(
            f"| {one.name} | {_number(one.ours)} {one.unit} | {_number(one.limit)} {one.unit} | {one.target} | {met} |"
        )
    return "\n".join(["| | measured | limit | target | |", "|---|---|---|---|---|", *rows])


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


AXIS_S = (0.05, 1000.0)


def draw(runs: Runs, labels: Mapping[str, str], path: Path) -> None:
    """Draw the medians of the first new step, and say where a system did not recover."""
    from matplotlib.figure import Figure

    shown = [fault for fault in FAULTS if any(f"{name} {fault}" in runs for name in labels)]
    figure = Figure(figsize=(9, 1 + 1.5 * len(shown)), layout="constrained")
    for fault, axes in zip(shown, figure.subplots(len(shown), sharex=True, squeeze=False)[:, 0], strict=True):
        names = [name for name in reversed(labels) if f"{name} {fault}" in runs]
        values = [middle(runs, name, fault) for name in names]
        colours = ["tab:blue" if name.startswith("ours") else "tab:grey" for name in names]
        bars = axes.barh(
            [labels[name].replace("`", "") for name in names], [value or AXIS_S[0] for value in values], color=colours
        )
        axes.bar_label(bars, [f" {value:.3g} s" if value else " no recovery" for value in values])
        axes.set_xscale("log")
        axes.set_xlim(*AXIS_S)
        axes.set_title(FAULTS[fault], loc="left")
    axes.set_xlabel("seconds from the fault to the first new step")
    figure.savefig(path, dpi=110)
