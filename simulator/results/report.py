"""Shows an outcome as text: how much time a cluster would lose, and to which causes."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table

from ...resilience.model.incident import PHASES
from ..engine.accounting import ACCOUNTS, STEPS
from ..engine.outcome import Outcome, mean, percentile
from .sensitivity import Cell

_HOUR_S = 3600.0


def told(outcome: Outcome, faults: str) -> list[RenderableType]:
    """Return the parts of the report, the most important first."""
    setting = outcome.setting
    spares = f" and {setting.spares} spares" if setting.spares else ", no spares"
    first = (
        f"{setting.nodes} nodes of {setting.per_node} GPUs{spares}, {setting.days:g} days, faults: {faults}"
        f"{f' x {setting.rate:g}' if setting.rate != 1 else ''}, seed {setting.seed}"
    )
    lost = sorted(outcome.lost_steps)
    etcd = outcome.etcd_per_s
    lines = [
        f"effective training time {outcome.effective:.2%}: {outcome.steps} steps of {setting.costs.step_s:g} s",
        f"{outcome.drawn} faults, {sum(outcome.struck.values())} of which struck the job; {outcome.generations} generations",
        f"lost steps of a recovery: mean {mean(lost):.1f}, 99 % at most {percentile(lost, 0.99)}, at most {max(lost, default=0)}",
        f"nodes away for repair: mean {outcome.away_mean:.1f}, at most {outcome.away_most}; {outcome.away_at_most(0.99)} spares "
        "would have been enough for 99 % of the time",
        f"etcd: {etcd:.0f} operations a second on average ({outcome.etcd_steady_per_s:.0f} of them keepalives and repeated "
        f"statuses); up to {outcome.etcd_wave} writes at once when a generation changes",
    ]
    if outcome.shut_out:
        lines.append(f"nodes in quarantine: {outcome.shut_out} times")
    for ending in outcome.endings:
        lines.append(f"day {ending.at_s / 86400:.1f}: the job gave up (exit code {ending.code}): {ending.reason}")
    tables = (_accounts(outcome), _recoveries(outcome), _phases(outcome))
    return [first, *lines, *(table for table in tables if table.row_count)]


def _table(*headings: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for at, heading in enumerate(headings):
        table.add_column(heading, justify="right" if at else "left")
    return table


def _accounts(outcome: Outcome) -> Table:
    table = _table("where the time went", "hours", "share", "")
    table.columns[3].justify = "left"
    for name, words in ACCOUNTS.items():
        spent_s = outcome.spent_s[name]
        if spent_s > 0.5 or name == STEPS:
            table.add_row(name, f"{spent_s / _HOUR_S:.2f}", f"{spent_s / outcome.setting.lasts_s:.3%}", words)
    return table


def _recoveries(outcome: Outcome) -> Table:
    table = _table("incident", "rung", "count")
    for (cause, rung), count in sorted(outcome.recoveries.items(), key=lambda item: -item[1]):
        table.add_row(cause, str(rung), str(count))
    return table


def _phases(outcome: Outcome) -> Table:
    table = _table("phase of a recovery", "mean s", "at most s")
    for name in PHASES:
        if took := outcome.phases_s.get(name):
            table.add_row(name, f"{mean(took):.1f}", f"{max(took):.1f}")
    return table


def sensitivity(cells: Sequence[Cell]) -> Table:
    """Return a table with a row for each restart time and interval, and a column for each fault rate."""
    rates = sorted({cell.rate for cell in cells})
    table = _table("restart", "snapshots every", *(f"faults x {rate:g}" for rate in rates))
    by = {(cell.restart_s, cell.interval_s, cell.rate): cell.effective for cell in cells}
    for restart_s, interval_s in dict.fromkeys((cell.restart_s, cell.interval_s) for cell in cells):
        interval = f"{interval_s:g} s" if interval_s else "as chosen"
        table.add_row(f"{restart_s:g} s", interval, *(f"{by[restart_s, interval_s, rate]:.2%}" for rate in rates))
    return table


def show(parts: Sequence[RenderableType]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    for part in parts:
        console.print(part)
