"""What `race.py --write` makes of its results: docs/benchmarks.md, and the section of it that was measured on GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import race_table
from measure import Result
from race_table import FAULTS

BEGIN, END = "<!-- what was measured on GPUs -->\n", "<!-- end of what was measured on GPUs -->\n"
HERE = Path(__file__).parent / "race"
TEMPLATES = {"cpu": "page.md", "cuda": "page-cuda.md"}


def put(page: str, device: str, text: str) -> str:
    """Return the page with the part for one device replaced. The other device's part stays, because its results may be gone."""
    head, _, rest = page.partition(BEGIN)
    section, _, tail = rest.partition(END)
    if device == "cpu":
        head, _, rest = text.partition(BEGIN)
        text, tail = section, rest.partition(END)[2]
    return f"{head}{BEGIN}{text}{END}{tail}"


def _parts(
    systems: Mapping[str, Mapping[str, Any]], kept: Mapping[str, Any], found: Sequence[Result]
) -> dict[str, Any]:
    """Return what the templates have in braces."""
    labels = {name: system["label"] for name, system in systems.items() if name in kept["versions"]}
    loads = [run["load"] for run in kept["runs"].values()]
    settings = [
        f"| {system['label']} | {kept['versions'][name]} | {system['checkpoint'].format(**kept['settings'])} | {system['limits']} |"
        for name, system in systems.items()
        if name in labels
    ]
    where = "" if kept["settings"]["device"] == "cpu" else ", on GPUs"
    faults = [
        f"### {title}{where}\n\n{race_table.table(kept['runs'], fault, labels)}"
        for fault, title in FAULTS.items()
        if any(f"{name} {fault}" in kept["runs"] for name in labels)
    ]
    return {
        **kept["settings"], **kept["machine"], "lightest": min(loads), "heaviest": max(loads),
        "targets": race_table.targets(found), "faults": "\n\n".join(faults), "systems": "\n".join(settings),
        "phases": race_table.phases(kept["runs"], labels),
    }  # fmt: skip


def write(
    page: Path, systems: Mapping[str, Mapping[str, Any]], kept: Mapping[str, Any], found: Sequence[Result], **more: Any
) -> None:
    """Write the part of the page that the results are for, and their picture. more: further texts for the templates."""
    device = kept["settings"]["device"]
    text = (HERE / TEMPLATES[device]).read_text().format(**_parts(systems, kept, found), **more)
    page.write_text(put(page.read_text() if page.exists() else "", device, text))
    picture = page.parent / "img" / ("race.png" if device == "cpu" else f"race-{device}.png")
    labels = {name: system["label"] for name, system in systems.items() if name in kept["versions"]}
    race_table.draw(kept["runs"], labels, picture)
