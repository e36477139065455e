"""Plots of an outcome, as self-contained SVG. This module draws them itself: four plain charts are a page of code, and a plotting library
would be the largest dependency of the program."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ..engine.accounting import ACCOUNTS, STEPS
from ..engine.outcome import Outcome
from .sensitivity import Cell

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 720, 360, 70, 50, 40
_COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5", "#9c6b4e")
_POINTS = 600
"""Points of a curve to draw; fewer than twice as many are drawn."""

Curve = Sequence[tuple[float, float]]


def of(outcome: Outcome, cells: Sequence[Cell]) -> dict[str, str]:
    """Return the plots by file name."""
    days = outcome.setting.days
    away = _stairs([(at_s / 86400, float(count)) for at_s, count in outcome.out], days)
    found = {
        "effective.svg": _curves("effective training time so far", "days", {"": outcome.seen}, low=_low(outcome.seen)),
        "losses.svg": _bars("where the rest of the time went: % of the run", _losses(outcome)),
        "away.svg": _curves("nodes away for repair", "days", {"": away}),
    }
    if cells:
        found["sensitivity.svg"] = _sensitivity(cells)
    return found


def _losses(outcome: Outcome) -> dict[str, float]:
    spent = {name: 100 * outcome.spent_s[name] / outcome.setting.lasts_s for name in ACCOUNTS if name != STEPS}
    return {name: share for name, share in spent.items() if share > 1e-6}


def _low(curve: Curve) -> float:
    """Return where the axis begins, so that losses are visible. The first day is left out, because it shows only the start."""
    return max(0.0, min((y for x, y in curve if x >= 1), default=0.0) - 0.005)


def _stairs(curve: Curve, end: float) -> Curve:
    last = [*curve[1:], (end, curve[-1][1])]
    return [point for (x, y), (until, _) in zip(curve, last, strict=True) for point in ((x, y), (until, y))]


def _sensitivity(cells: Sequence[Cell]) -> str:
    curves: dict[str, list[tuple[float, float]]] = {}
    for cell in cells:
        interval = f"every {cell.interval_s:g} s" if cell.interval_s else "as chosen"
        curves.setdefault(f"faults x {cell.rate:g}, snapshots {interval}", []).append((cell.restart_s, cell.effective))
    low = max(0.0, min(cell.effective for cell in cells) - 0.02)
    return _curves("effective training time", "seconds of a restart", curves, low=low, legend=True)


def _curves(
    title: str,
    under: str,
    curves: dict[str, Curve] | dict[str, list[tuple[float, float]]],
    *,
    low: float = 0.0,
    legend: bool = False,
) -> str:
    points = [point for curve in curves.values() for point in curve] or [(0.0, 0.0)]
    right, high = max(x for x, _ in points) or 1.0, max(y for _, y in points)
    high = high if high > low else low + 1
    height = _HEIGHT + (18 * len(curves) if legend else 0)

    def place(x: float, y: float) -> str:
        across = _LEFT + x / right * (_WIDTH - _LEFT - 20)
        up = (max(y, low) - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)
        return f"{across:.1f},{_HEIGHT - _BOTTOM - up:.1f}"

    parts = [_text(_LEFT, 24, title, size=15)]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)
        value = low + share * (high - low)
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - 20}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(_text(_LEFT - 6, y + 4, f"{value:.4g}", anchor="end"))
        x = _LEFT + share * (_WIDTH - _LEFT - 20)
        parts.append(_text(x, _HEIGHT - _BOTTOM + 18, f"{share * right:.4g}", anchor="middle"))
    parts.append(_text(_WIDTH / 2, _HEIGHT - 12, under, anchor="middle"))
    for at, (name, curve) in enumerate(curves.items()):
        colour = _COLOURS[at % len(_COLOURS)]
        shown = curve[:: max(1, len(curve) // _POINTS)]
        line = " ".join(place(x, y) for x, y in shown)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        if legend:
            y = _HEIGHT + 18 * at
            parts.append(f'<rect x="{_LEFT}" y="{y - 10}" width="12" height="12" fill="{colour}"/>')
            parts.append(_text(_LEFT + 18, y, name))
    return _picture(height, parts)


def _bars(title: str, values: dict[str, float]) -> str:
    most = max(values.values(), default=1.0)
    parts = [_text(_LEFT, 24, title, size=15)]
    for at, (name, value) in enumerate(values.items()):
        y, wide = _TOP + 26 * at, value / most * (_WIDTH - 260)
        parts.append(_text(110, y + 14, name, anchor="end"))
        parts.append(f'<rect x="118" y="{y}" width="{wide:.1f}" height="18" fill="{_COLOURS[0]}"/>')
        parts.append(_text(124 + wide, y + 14, f"{value:.3f}"))
    return _picture(_TOP + 26 * len(values) + 14, parts)


def _text(x: float, y: float, words: str, *, anchor: str = "start", size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(words)}</text>'


def _picture(height: float, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:.0f}" font-family="sans-serif">'
    return "\n".join([head, f'<rect width="{_WIDTH}" height="{height:.0f}" fill="#fff"/>', *parts, "</svg>", ""])
