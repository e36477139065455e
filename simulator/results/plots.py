"""Plots of an outcome, drawn by matplotlib: it writes PNG and SVG without a browser, so on any node of a cluster."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from ...resilience.text import formatting
from ..engine.accounting import ACCOUNTS, STEPS
from ..engine.outcome import Outcome
from .sensitivity import Cell

EFFECTIVE = "effective training time"
PERCENT = FuncFormatter(lambda share, _: f"{100 * share:.4g} %")


def of(outcome: Outcome, cells: Sequence[Cell]) -> dict[str, Figure]:
    """Return the plots by name."""
    found = {"effective": _effective(outcome), "losses": _losses(outcome), "away": _away(outcome)}
    return found | ({"sensitivity": _sensitivity(cells)} if cells else {})


def _effective(outcome: Outcome) -> Figure:
    figure, axes = _empty(f"{EFFECTIVE} so far: {100 * outcome.effective:.2f} % in the end", "days")
    axes.set_xlim(0, outcome.setting.days)
    points = [*outcome.seen, (outcome.setting.days, outcome.effective)]
    axes.plot(*zip(*points, strict=True), marker="o" if len(points) < 3 else "", clip_on=False)
    later = [share for day, share in points if day >= 1]  # the first day shows only the start
    axes.set_ylim(max(0.0, min(later, default=0.005) - 0.005), 1.0)
    axes.yaxis.set_major_formatter(PERCENT)
    return figure


def _losses(outcome: Outcome) -> Figure:
    figure, axes = _empty("how the rest of the time was spent", "share of the run")
    shares = {name: outcome.spent_s[name] / outcome.setting.lasts_s for name in ACCOUNTS if name != STEPS}
    shown = {name: share for name, share in reversed(shares.items()) if share > 1e-8}
    bars = axes.barh([*shown], [*shown.values()])
    axes.bar_label(bars, [f" {100 * share:.3f} %" for share in shown.values()])
    axes.xaxis.set_major_formatter(PERCENT)
    axes.margins(x=0.15)
    return figure


def _away(outcome: Outcome) -> Figure:
    figure, axes = _empty("nodes away for repair", "days")
    axes.set_xlim(0, outcome.setting.days)
    at_s, counts = zip(*outcome.out, strict=True)
    axes.step([*(each / 86400 for each in at_s), outcome.setting.days], [*counts, counts[-1]], where="post")
    spares = outcome.setting.spares
    axes.axhline(spares, linestyle="--", color="grey")
    axes.annotate(formatting.count(spares, "spare"), (0, spares), xytext=(4, 4), textcoords="offset points")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    return figure


def _sensitivity(cells: Sequence[Cell]) -> Figure:
    curves: dict[str, list[tuple[float, float]]] = {}
    for cell in cells:
        interval = f"every {cell.interval_s:g} s" if cell.interval_s else "as chosen"
        curves.setdefault(f"faults × {cell.rate:g}, snapshots {interval}", []).append((cell.restart_s, cell.effective))
    figure, axes = _empty(EFFECTIVE, "seconds of a restart")
    for name, points in curves.items():
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name)
    axes.yaxis.set_major_formatter(PERCENT)
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    return figure


def _empty(title: str, under: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, loc="left")
    axes.set_xlabel(under)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes
