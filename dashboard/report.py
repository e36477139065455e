"""`mt-resilient report`: writes the page of one job as one HTML file, with its data and all scripts in it, so that it opens without a
server."""

from __future__ import annotations

import json
from pathlib import Path

from ..agent.cli.explain import zoned
from ..agent.cli.run_reader import RunReader
from ..agent.run_directory import RunDirectory
from ..resilience.errors import MachineError
from ..resilience.report import page_view
from .contents import FILES, HERE, details, summary

_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


def report(directory: RunDirectory, target: Path | None) -> int:
    """Write the report of the job, and print its path. target: the file; None: `report.html` in the run directory. Raises MachineError."""
    reader = RunReader([directory])
    reader.look()
    place = target or directory.root / "report.html"
    fresh = place.with_name(f".{place.name}.new")
    try:
        fresh.write_text(_page(reader), encoding="utf-8")
        fresh.replace(place)
    except OSError as error:
        raise MachineError(
            f"the report cannot be written to {place} ({error.strerror}); name another file with --out"
        ) from error
    print(place.absolute())
    return 0


def _page(reader: RunReader) -> str:
    told = {"run": 0, **summary(reader), **details(reader, 0.0), "prometheus": ""}
    told["now"] = told["until_s"]
    stories = {number: page_view.story(number, each, zoned(each.at_s)) for number, each in reader.incidents.items()}
    embedded = json.dumps({"told": told, "stories": stories}).replace("<", "\\u003c")  # so it ends no script element
    script = {name: path.read_text() for name, path in FILES.items()}
    parts = {
        '<meta charset="utf-8">': f'<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<link rel="stylesheet" href="static/page.css">': f"<style>{script['page.css']}</style>",
        '<script src="static/page.js" type="module"></script>': "\n".join(
            (
                f'<script id="report" type="application/json">{embedded}</script>',
                f"<script>{script['plotly.min.js']}</script>",
                f'<script type="module">{script["page.js"]}</script>',
            )
        ),
    }
    page = (HERE / "page.html").read_text()
    for what, by in parts.items():
        before, found, behind = page.partition(what)
        assert found, what
        page = f"{before}{by}{behind}"
    return page
