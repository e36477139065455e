"""The warm process's watch finds what a forked rank cannot have from its parent, and nothing in what ordinary modules do at import."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from ..harness import environment
from .fresh.kept import KEPT_BY_A_FORK
from .fresh.litter import CLEAN, LITTER, PACKAGES

pytestmark = pytest.mark.xdist_group("watch")

WATCHED = Path(__file__).parent / "fresh" / "watched.py"


def name_of(kind: str, title: str) -> str:
    return f"{kind}_" + re.sub(r"\W", "_", title)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the watch has found, by module."""
    place = tmp_path_factory.mktemp("watched")
    names = []
    for kind, sources in {"clean": CLEAN, "litter": LITTER, "kept": KEPT_BY_A_FORK}.items():
        for title, source in sources.items():
            names.append(name_of(kind, title))
            (place / f"{names[-1]}.py").write_text(textwrap.dedent(source))
    (installed := place / "site-packages").mkdir()
    (installed / "coloured.py").write_text("import sys; COLOURS = sys.stderr.isatty()")
    command = [sys.executable, "-u", str(WATCHED), str(place), *names, *PACKAGES, "coloured"]
    with (place / "printed").open("w") as printed:
        done = subprocess.run(
            command,
            env=environment(PLACE=str(place), PYTHONWARNINGS="", PYTHONPATH=str(installed)),
            stdin=-3,
            stdout=printed,
            stderr=printed,
        )
    assert done.returncode == 0, (place / "printed").read_text()
    return dict(map(json.loads, (place / "found").read_text().splitlines()))


@pytest.mark.variant
def test_what_a_fork_does_not_keep_is_found(found: dict[str, str]) -> None:
    assert not [title for title in LITTER if not found[name_of("litter", title)]]


@pytest.mark.parametrize(("kind", "sources"), [("kept", KEPT_BY_A_FORK), ("clean", CLEAN)])
def test_nothing_is_found_in_what_a_fork_keeps(found: dict[str, str], kind: str, sources: dict[str, str]) -> None:
    assert {title: what for title in sources if (what := found[name_of(kind, title)])} == {}


def test_nothing_is_found_in_packages(found: dict[str, str]) -> None:
    assert {name: what for name in PACKAGES if name != "lightning" and (what := found.get(name, ""))} == {}


def test_a_package_that_keeps_the_rank_it_was_imported_with_is_found(found: dict[str, str]) -> None:
    assert found.get("lightning", "LOCAL_RANK").count("LOCAL_RANK") == 1


def test_a_package_that_chooses_its_colours_at_import_is_found(found: dict[str, str]) -> None:
    """As loguru does."""
    assert found["coloured"] == "asks whether it prints to a terminal (in coloured)"
