"""A rank of ours cannot be told from a fresh interpreter that torchrun has started: not by what it sees at its start, not by how it ends.

Each script runs under plain torchrun, under ours cold, warm, and warm once more after a rank was killed. What they write down is equal but
for the list in `fresh/expected.py`.
"""

from __future__ import annotations

import os
import re
import sys
import textwrap
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from .fresh.ending import WAYS
from .fresh.expected import differences
from .fresh.litter import LITTER, module
from .fresh.running import COLD, PLAIN, SCRIPTS, WARM, Run, an_odd_parent

ARGUMENTS = ("a b", "ü", "", "--flag=-1", "*", "$HOME")


Reports = dict[str, list[dict[str, object]]]
"""Of both ranks, by how they were started; `again`: warm, after a rank was killed."""


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    place = tmp_path_factory.mktemp("start")
    runs = {how: Run(place, how) for how in (PLAIN, COLD, WARM)}
    for run in runs.values():
        for wish in ("torch", "imports"):
            (run.out / wish).touch()
        if run.how == WARM:
            (run.out / "two lives").touch()
        run.start("script.py", str(run.out), *ARGUMENTS, ranks=2, prepare=an_odd_parent)
    runs[WARM].kill_once_known("rank0.ready")
    for run in runs.values():
        run.end()
    found = {how: [run.report(f"rank{rank}.life1") for rank in (0, 1)] for how, run in runs.items()}
    return found | {"again": [runs[WARM].report(f"rank{rank}.life2") for rank in (0, 1)]}


@pytest.mark.parametrize("how", [COLD, WARM, "again"])
def test_a_rank_sees_at_its_start_what_it_sees_under_torchrun(reports: Reports, how: str) -> None:
    found = []
    for plain, ours in zip(reports[PLAIN], reports[how], strict=True):
        found += [line for line in differences(plain, ours, warm=how != COLD) if not line.startswith("drawn.")]
    assert not found, "\n".join(dict.fromkeys(found))


@pytest.mark.parametrize("how", [COLD, WARM, "again"])
def test_two_ranks_draw_alike_what_they_draw_alike_under_torchrun(reports: Reports, how: str) -> None:
    """And nothing else: what one draws unseeded the other does not draw, nor the same rank in another life."""

    def alike(one: dict[str, object], other: dict[str, object]) -> dict[str, object]:
        return {"drawn": {name: value == other["drawn"][name] for name, value in one["drawn"].items()}}  # type: ignore[attr-defined,index]

    expected = alike(*reports[PLAIN])
    found = differences(expected, alike(*reports[how]), warm=how != COLD)
    for before in (WARM, PLAIN) if how == "again" else (PLAIN,):
        found += differences(expected, alike(reports[before][0], reports[how][0]), warm=how != COLD)
    assert not found, "\n".join(dict.fromkeys(found))


# -- ways to leave ----------------------------------------------------------------------------------------------------------

GOOD = [way for way, (code, _) in WAYS.items() if code == 0]
BAD = [way for way, (code, _) in WAYS.items() if code != 0]
_TORCHRUN_SAYS = re.compile(r"failed \(exitcode: (-?\d+)\)()")
_WE_SAY = re.compile(
    r"^mt-resilient [\d:]+ rank 0 on \S+ (?:left with exit code (\d+)|was killed by signal (\d+))", re.M
)


def told(run: Run) -> dict[str, dict[str, str]]:
    """What is left in the files of each way, by way and kind of file."""
    found: dict[str, dict[str, str]] = {}
    for file in sorted(run.out.iterdir()):
        way, _, kind = file.name.rpartition(".")
        found.setdefault(way, {})[kind] = run.read(file.name) if file.is_file() else "a folder"
    return found


def codes(run: Run, ways: Sequence[str]) -> dict[str, int]:
    """Exit code of each life, negative for a signal, as the launcher or the agent tells it; in the end 0."""
    says = _TORCHRUN_SAYS if run.how == PLAIN else _WE_SAY
    found = [int(left or f"-{killed}") for left, killed in says.findall(run.said)]
    return dict(zip(ways, [*found, run.process.returncode], strict=False))


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    """By how it was started: of each way to leave, what it has written and the exit code."""
    place = tmp_path_factory.mktemp("ending")
    good = {how: Run(place / "good", how) for how in (PLAIN, COLD, WARM)}
    bad = {how: Run(place / "bad", how) for how in (PLAIN, WARM)}
    for run in good.values():
        run.start("ending.py", str(run.out), "ranks", *GOOD, ranks=len(GOOD)).end()
    for run in bad.values():
        run.start("ending.py", str(run.out), "lives", *BAD, "end", lives=1 + len(BAD))
    for run in bad.values():
        run.end()
    found: dict[str, dict[str, object]] = {
        how: {"files": told(run), "code": run.process.returncode} for how, run in good.items()
    }
    for how, run in bad.items():
        found[f"{how}, failing"] = {"files": told(run), "codes": codes(run, BAD)}
    return found


@pytest.mark.parametrize("how", [COLD, WARM])
def test_a_rank_that_leaves_in_order_leaves_as_under_torchrun(endings: dict[str, dict[str, object]], how: str) -> None:
    found = differences(endings[PLAIN], endings[how], warm=how == WARM)
    assert not found, "\n".join(found)


def test_a_rank_that_fails_fails_as_under_torchrun(endings: dict[str, dict[str, object]]) -> None:
    found = differences(endings[f"{PLAIN}, failing"], endings[f"{WARM}, failing"], warm=True)
    assert not found, "\n".join(found)
    assert endings[f"{PLAIN}, failing"]["codes"] == {way: WAYS[way][0] for way in BAD}


# -- what imports leave behind ----------------------------------------------------------------------------------------------


def littered(place: Path, how: str) -> Run:
    run = Run(place, how)
    for sources in LITTER.values():
        for name, source in sources.items():
            (run.here / f"litter_{module(name)}.py").write_text(textwrap.dedent(source))
    return run


def broken(run: Run, seen: dict[str, object]) -> list[str]:
    """Promises of `seen` that were not kept."""
    found = []
    for name, value in seen.items():
        if not isinstance(value, dict):
            continue
        if "printed" in value and value["printed"] not in run.printed:
            found.append(f"{name}: {value['printed']!r} is not in the output")
        if "at_exit" in value and (wrote := run.read(value["at_exit"])) != "finalizer, exit handler, ":
            found.append(f"{name}: at the exit, {wrote!r}")
        if "gone_at_exit" in value and (run.out / value["gone_at_exit"]).exists():
            found.append(f"{name}: {value['gone_at_exit']} is still there")
    return found


def compared(seen: dict[str, object]) -> dict[str, object]:
    promises = {"drawn", "printed", "at_exit", "gone_at_exit"}
    return {
        name: {word: v for word, v in value.items() if word not in promises} if isinstance(value, dict) else value
        for name, value in seen.items()
    }


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    """What has become of it in a fresh interpreter, by group."""
    run = littered(tmp_path_factory.mktemp("litter"), PLAIN)
    groups = ["+".join(map(module, names)) for names in LITTER.values()]
    run.start("littered.py", str(run.out), "plain", *groups, ranks=len(groups)).end()
    found = {group: run.report(f"rank{rank}.life1") for rank, group in enumerate(LITTER)}
    assert not [line for seen in found.values() for line in broken(run, seen)]
    return found


@pytest.mark.parametrize("group", LITTER)
def test_what_an_import_leaves_behind_is_the_ranks_own_after_a_recovery(
    tmp_path: Path, undisturbed: dict[str, dict[str, object]], group: str
) -> None:
    run = littered(tmp_path, WARM)
    run.start("littered.py", str(run.out), "trains", *map(module, LITTER[group]), ranks=2, lives=2)
    run.kill_once_known("rank0.ready").end()
    both = [run.report(f"rank{rank}.life2") for rank in (0, 1)]
    found = []
    for seen in both:
        found += differences(compared(undisturbed[group]), compared(seen), warm=True) + broken(run, seen)
    for name, value in both[0].items():
        if isinstance(value, dict) and "drawn" in value and value["drawn"] == both[1][name]["drawn"]:  # type: ignore[index]
            found.append(f"{name}: both ranks have drawn {value['drawn']}")
    assert not found, "\n".join(dict.fromkeys(found))
    assert run.process.returncode == 0, run.said


# -- ways to start ----------------------------------------------------------------------------------------------------------

TEXT = (SCRIPTS / "script.py").read_bytes()
DOCSTRING_ENDS = TEXT.index(b'"""\n', 3) + 4


def _zipped(here: Path) -> None:
    with zipfile.ZipFile(here / "app.zip", "w") as archive:
        archive.writestr("__main__.py", TEXT)


def _package(here: Path) -> None:
    _put(here, "package/__init__.py", b"")
    _put(here, "package/__main__.py")


def _put(here: Path, name: str, text: bytes = TEXT) -> None:
    (here / name).parent.mkdir(parents=True, exist_ok=True)
    (here / name).write_bytes(text)


def _executable(here: Path, name: str, text: str) -> None:
    _put(here, name, text.encode())
    (here / name).chmod(0o755)


FUTURE = TEXT[:DOCSTRING_ENDS] + b"from __future__ import annotations\n" + TEXT[DOCSTRING_ENDS:]
STYLES: dict[str, tuple[Callable[[Path], object], Sequence[str]]] = {
    "a symlink in another folder": (
        lambda here: (_put(here, "deep/er/real.py"), (here / "deep/er/train me").symlink_to("real.py")),
        ["deep/../deep/er/train me"],
    ),
    "a folder": (lambda here: _put(here, "app/__main__.py"), ["app"]),
    "a zip file": (_zipped, ["app.zip"]),
    "a package": (_package, ["-m", "package"]),
    "another encoding and a __future__ of its own": (
        lambda here: _put(here, "s.py", b"# coding: cp1252\n" + FUTURE + "É = 'é'\n".encode("cp1252")),
        ["s.py"],
    ),
    "a byte order mark and CRLF": (
        lambda here: _put(here, "s.py", b"\xef\xbb\xbf" + TEXT.replace(b"\n", b"\r\n")),
        ["s.py"],
    ),
    "torchrun's own logs": (lambda here: None, ["--redirects", "1", "--tee", "0:2", "--log-dir", "logs", "script.py"]),
    "options of Python": (
        lambda here: None,
        ["--no-python", sys.executable, "-O", "-W", "error::BytesWarning", "-X", "dev", "script.py"],
    ),
    "a wrapper": (
        lambda here: _executable(
            here, "wrap.sh", f'#!/bin/sh\nexport WRAPPED=1\n{sys.executable} -c 1\n{sys.executable} "$@"\n'
        ),
        ["--no-python", "./wrap.sh", "script.py"],
    ),
    "run by path": (lambda here: None, ["--run-path", "script.py"]),
}
"""How a script is started: what is put into its folder, and torchrun's words up to the script."""


def started(place: Path, arrange: Callable[[Path], object], *words: str, **extra: str) -> tuple[list[str], list[int]]:
    """Differences of a warm rank from one of plain torchrun, both started by `words`, and both exit codes."""
    runs = [Run(place, how, **{"PYTHONPATH": str(place / how), **extra}) for how in (PLAIN, WARM)]
    for run in runs:
        arrange(run.here)
        run.start(*(word.replace("OUT", str(run.out)) for word in words))
    for run in runs:
        run.end()
    plain, ours = (run.report("rank0.life1") for run in runs)
    found = [line for line in differences(plain, ours, warm=True) if not line.startswith("drawn.")]
    return found, [run.process.returncode for run in runs]


@pytest.mark.parametrize("style", STYLES)
def test_a_script_is_started_as_torchrun_starts_it(tmp_path: Path, style: str) -> None:
    arrange, words = STYLES[style]
    found, left = started(tmp_path, arrange, *words, "OUT", *ARGUMENTS)
    assert not found, "\n".join(found)
    assert left == [0, 0]


def test_an_argument_need_not_be_text(tmp_path: Path) -> None:
    found, left = started(tmp_path, lambda here: None, "script.py", "OUT", os.fsdecode(b"\xff\xfe"))
    assert not found, "\n".join(found)
    assert left == [0, 0]


VARIABLES = {
    "PYTHONOPTIMIZE": "1",
    "PYTHONWARNINGS": "once::UserWarning,error::BytesWarning",
    "PYTHONDEVMODE": "1",
    "PYTHONHASHSEED": "7",
    "PYTHONIOENCODING": "latin-1:replace",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONPYCACHEPREFIX": "/nowhere",
    "PYTHONSAFEPATH": "1",
    "PYTHONUNBUFFERED": "1",
    "PYTHONINTMAXSTRDIGITS": "5000",
    "PYTHONUTF8": "1",
    "PYTHONNOUSERSITE": "1",
    "LC_ALL": "C",
    "TZ": "Asia/Shanghai",
    "TMPDIR": "/var/tmp",
}


def test_what_the_environment_tells_python_it_tells_a_rank_too(tmp_path: Path) -> None:
    site = b"import os\nos.environ['OF_SITECUSTOMIZE'] = '1'\n"
    found, left = started(tmp_path, lambda here: _put(here, "sitecustomize.py", site), "script.py", "OUT", **VARIABLES)
    assert not found, "\n".join(found)
    assert left == [0, 0]


FAULTY: dict[str, tuple[bytes, Sequence[str]]] = {
    "no Python": (b"def main(:\n    pass\n", ["script.py"]),
    "no module": (b"", ["-m", "nothing_of_the_kind"]),
}


@pytest.mark.parametrize("fault", FAULTY)
def test_a_script_that_cannot_run_says_what_it_says_under_torchrun(tmp_path: Path, fault: str) -> None:
    text, words = FAULTY[fault]
    runs = [Run(tmp_path, how) for how in (PLAIN, WARM)]
    for run in runs:
        _put(run.here, "script.py", text)
        run.start("--redirects", "2", "--log-dir", "logs", *words, "an argument")
    for run in runs:
        run.end()
    plain, ours = (min(run.here.glob("logs/*/*/0/stderr.log"), key=os.path.getmtime) for run in runs)
    assert runs[1].same(ours.read_text()) == runs[0].same(plain.read_text())
