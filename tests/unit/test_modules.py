"""What a rank has imported comes back from the same places, or is left to the next ranks."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mt_resilient.training.modules import Noted, note


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Path]]:
    """Two folders with modules of the same names; the first one is the script's."""
    for name in ("script", "elsewhere"):
        package = tmp_path / name / "odd_package"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("")
        (package / "part.py").write_text("")
        (tmp_path / name / "odd_module.py").write_text("")
        (tmp_path / name / "odd_space" / "inner").mkdir(parents=True)
    (tmp_path / "script" / "odd_script.py").write_text("raise SystemExit('not without my script')")
    before, path = set(sys.modules), list(sys.path)
    yield tmp_path / "script", tmp_path / "elsewhere"
    sys.path[:] = path
    for name in set(sys.modules) - before:
        del sys.modules[name]


ODD = ("odd_module", "odd_package", "odd_package.part", "odd_space", "odd_space.inner")


def forget() -> None:
    for name in ODD:
        sys.modules.pop(name, None)


def noted(script: Path, file: Path) -> Noted:
    """What a rank has noted that found everything in `script`."""
    sys.path.insert(0, str(script))
    for name in ODD:
        __import__(name)
    note(file)
    sys.path.remove(str(script))
    forget()
    known = Noted.read(file)
    return Noted(known.path, {name: place for name, place in known.places.items() if name.startswith("odd")})


def test_all_come_back_from_where_they_were(places: tuple[Path, Path], tmp_path: Path) -> None:
    known = noted(places[0], tmp_path / "modules")
    path = list(sys.path)
    assert list(known.places) == list(ODD)
    assert (known.bring_back(), known.foreign()) == ([], "")
    assert {Path(sys.modules[name].__file__ or "").parts[-2] for name in ODD[:1]} == {"script"}
    assert sys.path == path


def test_what_would_come_from_elsewhere_is_left_with_all_below_it(places: tuple[Path, Path], tmp_path: Path) -> None:
    known = noted(places[0], tmp_path / "modules")
    moved = Noted([str(places[1]), *sys.path], known.places)
    assert moved.bring_back() == list(ODD)
    assert not set(ODD) & set(sys.modules)


def test_what_has_come_from_elsewhere_all_the_same_is_told(places: tuple[Path, Path], tmp_path: Path) -> None:
    known = noted(places[0], tmp_path / "modules")
    sys.path.insert(0, str(places[1]))
    __import__("odd_module")  # brought along by another one
    assert known.bring_back() == ["odd_module"]
    assert known.foreign() == (
        f"the module odd_module comes from {places[1]}/odd_module.py here, and from {places[0]}/odd_module.py in the ranks"
    )


def test_a_module_that_wants_its_script_is_left_to_it(places: tuple[Path, Path]) -> None:
    script = str(places[0])
    known = Noted([script, *sys.path], {"odd_script": (f"{script}/odd_script.py", []), "odd_missing": ("/nowhere", [])})
    assert (known.bring_back(), known.foreign()) == (["odd_script", "odd_missing"], "")
