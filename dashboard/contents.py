"""The data of one job that the page and the report show, as JSON; and the files that the page and the report consist of."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

from ..agent.cli.run_reader import RunReader
from ..resilience.clock import wall_s
from ..resilience.report import page_view, time_ledger
from ..resilience.text.formatting import printable
from ..resilience.text.secrets import hidden

HERE = Path(__file__).parent / "static"
FILES = {
    "page.js": HERE / "page.js",
    "page.css": HERE / "page.css",
    "plotly.min.js": Path(str(files("plotly"))) / "package_data" / "plotly.min.js",
}


def summary(reader: RunReader) -> dict[str, Any]:
    """Return the state of the job and what it has cost."""
    seen, now = reader.seen(), wall_s()
    state, lives, step_s = page_view.state(seen, now), reader.lives, seen.last.get("progress", {}).get("step_s")
    reached_s = now if seen.alive or not lives else max(life["until_s"] for life in lives)
    down_s = now - reached_s if state["mood"] == "bad" else 0.0
    return {
        "job": printable(reader.job),
        "directory": printable(", ".join(str(each.root) for each in reader.directories)),
        "state": {**state, "last": page_view.last_incident(seen.incidents)},
        "costs": time_ledger.costs(lives, seen.incidents, reached_s, down_s, step_s or 0.0),
        "runs": seen.alive,
    }


def details(reader: RunReader, since_s: float) -> dict[str, Any]:
    """Return everything that `summary` does not contain. since_s: the wall-clock time at which the curve begins."""
    now, start, incidents = wall_s(), reader.last.get("start", {}), reader.incidents
    back = time_ledger.came_back(incidents)
    return {
        "now": now,
        "command": printable(" ".join(hidden(start.get("command", ())))),
        "from_s": reader.lives[0]["from_s"] if reader.lives else now,
        "until_s": now if reader.alive else max((life["until_s"] for life in reader.lives), default=now),
        "curve": page_view.curve(reader.progress, since_s),
        "present": page_view.present(reader.last.get("progress", {}), now) if reader.alive else None,
        "incidents": [page_view.row(number, each, number in back) for number, each in incidents.items()],
        "further": page_view.further(start, reader.written, incidents),
    }
