"""What ranks have imported of a package that the warm process has, it imports too, from the same places; the rest is left to the ranks."""

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from mt_resilient.training.loops.hooks import replace_everywhere
from mt_resilient.training.warm.imported_modules import Noted, note, spec_of

ODD = ("odd_package", "odd_package.part", "odd_space", "odd_space.inner", "odd_module")


@pytest.fixture
def places(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """Two folders of installed packages, with modules of the same names."""
    for name in ("here", "elsewhere"):
        site = tmp_path / name / "site-packages"
        for folder in ("odd_package", "odd_space/inner"):
            (site / folder).mkdir(parents=True)
        for file in ("odd_package/__init__.py", "odd_package/part.py", "odd_module.py"):
            (site / file).touch()
        (site / "odd_package" / "odd.py").write_text("raise SystemExit('not without my script')")
    before, path = set(sys.modules), list(sys.path)
    yield tmp_path / "here" / "site-packages", tmp_path / "elsewhere" / "site-packages"
    sys.path[:] = path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def noted(site: Path, file: Path) -> Noted:
    """What a rank has noted that found everything in `site`, which is on sys.path from then on."""
    sys.path.insert(0, str(site))
    for name in ODD:
        __import__(name)
    note(file, {**os.environ, "RANK": "0"})
    for name in ODD:
        del sys.modules[name]
    return Noted.read(file)


def odd() -> list[str]:
    return [name for name in sys.modules if name.startswith("odd")]


def test_a_package_that_is_here_is_completed_and_others_are_not_begun(
    places: tuple[Path, Path], tmp_path: Path
) -> None:
    known = noted(places[0], tmp_path / "modules")
    __import__("odd_package")
    known.complete()
    assert odd() == ["odd_package", "odd_package.part"]
    assert (known.environment, known.foreign()) == ([*os.environ, "RANK"], "")


def test_what_a_script_does_to_its_environment_before_its_first_step_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module that reads it when the loop wants it must not be imported ahead. No value is written down."""
    monkeypatch.setenv("BEFORE", "as it was")
    monkeypatch.setenv("TAKEN", "away")
    began = dict(os.environ)
    monkeypatch.setenv("BEFORE", "not for a file")
    monkeypatch.setenv("COME", "1")
    monkeypatch.delenv("TAKEN")
    note(tmp_path / "modules", began)
    known = Noted.read(tmp_path / "modules")
    assert known.otherwise() == set()
    assert "not for a file" not in (tmp_path / "modules").read_text()
    os.environ |= {"BEFORE": "as it was", "TAKEN": "away"}
    del os.environ["COME"]
    assert known.otherwise() == {"BEFORE", "COME", "TAKEN"}


def test_the_scripts_own_modules_are_left_to_the_ranks(tmp_path: Path) -> None:
    own = Noted([], {}, {"odd_package.part": (f"{tmp_path}/odd_package/part.py", [])})
    sys.modules["odd_package"] = sys
    own.complete()
    assert odd() == ["odd_package"]
    del sys.modules["odd_package"]


def test_what_would_come_from_elsewhere_is_left_with_all_below_it(places: tuple[Path, Path], tmp_path: Path) -> None:
    known = noted(places[0], tmp_path / "modules")
    sys.path[0] = str(places[1])
    __import__("odd_space")
    __import__("odd_package")
    known.complete()
    assert odd() == ["odd_space", "odd_package"]
    assert known.foreign().startswith("the module odd_package comes from ")


def test_a_namespace_package_is_the_same_if_sys_path_leads_to_its_folder_twice(
    places: tuple[Path, Path], tmp_path: Path
) -> None:
    """As a checkout on PYTHONPATH does, whose script lies in its root."""
    sys.path.insert(0, str(places[0]))
    known = noted(places[0], tmp_path / "modules")
    sys.path.remove(str(places[0]))
    __import__("odd_space")
    assert known.foreign() == ""


def test_a_module_that_cannot_be_imported_without_its_script_is_left_to_it(places: tuple[Path, Path]) -> None:
    sys.path.insert(0, str(places[0]))
    __import__("odd_package")
    known = Noted(
        [], {}, {f"odd_package.{name}": (f"{places[0]}/odd_package/{name}.py", []) for name in ("odd", "missing")}
    )
    known.complete()
    assert odd() == ["odd_package"]


def test_a_lazy_module_is_not_executed_and_no_object_in_sys_modules_disturbs_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `importlib.util.LazyLoader` leaves a broken package that the script does not use, and as stubs stand for missing packages."""
    (tmp_path / "odd_lazy.py").write_text("raise ImportError('broken')")
    spec = importlib.util.spec_from_file_location("odd_lazy", tmp_path / "odd_lazy.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    lazy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lazy)
    monkeypatch.setitem(sys.modules, "odd_lazy", lazy)
    monkeypatch.setitem(sys.modules, "odd_stub", MagicMock())
    monkeypatch.setitem(sys.modules, "odd_number", 1)  # type: ignore[arg-type]
    assert spec_of(lazy) is None
    replace_everywhere(object(), None)
    note(tmp_path / "modules", os.environ)
    known = Noted.read(tmp_path / "modules")
    assert "pytest" in known.places
    assert not [name for name in known.places if name.startswith("odd")]


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"environment": [], "modules": [["a"]]}', '{"environment": 1, "modules": 2}']
)
def test_a_damaged_note_is_told_from_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "modules").write_text(text)
    with pytest.raises(ValueError, match=r"Expecting value|not a record of imported modules|unpack"):
        Noted.read(tmp_path / "modules")
