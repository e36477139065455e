"""A rank of ours cannot be told from a fresh interpreter that torchrun has started: not by what it sees at its start, not by how it ends.

Each script runs under plain torchrun and under ours. There its first life, which is torchrun's own start, trains until it is killed, and
the next one is forked. What they write down is equal but for the list in `fresh/expected.py`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from ..harness import environment, some_of
from .fresh.ending import WAYS
from .fresh.expected import differences
from .fresh.kept import KEPT_BY_A_FORK
from .fresh.litter import LITTER
from .fresh.running import COLD, PLAIN, SCRIPTS, WARM, Run, an_odd_parent

pytestmark = pytest.mark.xdist_group("fresh interpreter")

FORKED = "forked"
ARGUMENTS = ("a b", "ü", "", "--flag=-1", "*", "$HOME")


def without_torch(script: Path) -> None:
    """What it begins with for the sake of forks, where there are none: that takes long. Its lines keep their numbers."""
    script.write_text(re.sub(r"^(import torch\b.*|from fresh.training .*)$", "pass", script.read_text(), flags=re.M))


Reports = dict[str, list[dict[str, object]]]
"""Of both ranks, by how they were started; FORKED: warm, in the second life."""


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    place = tmp_path_factory.mktemp("start")
    runs = {how: Run(place, how) for how in (PLAIN, COLD, WARM)}
    (runs[WARM].out / "two lives").touch()
    for run in runs.values():
        run.start("script.py", str(run.out), *ARGUMENTS, ranks=2, prepare=an_odd_parent)
    runs[WARM].kill_once_warm()
    for run in runs.values():
        run.end()
    assert runs[WARM].launches == ["warm"]
    found = {how: [run.report(f"rank{rank}.life1") for rank in (0, 1)] for how, run in runs.items()}
    return found | {FORKED: [runs[WARM].report(f"rank{rank}.life2") for rank in (0, 1)]}


@pytest.mark.parametrize("how", [COLD, WARM, FORKED])
def test_a_rank_sees_at_its_start_what_it_sees_under_torchrun(reports: Reports, how: str) -> None:
    found = []
    for plain, ours in zip(reports[PLAIN], reports[how], strict=True):
        found += [line for line in differences(plain, ours, warm=how == FORKED) if not line.startswith("drawn.")]
    assert not found, "\n".join(dict.fromkeys(found))


@pytest.mark.parametrize("how", [COLD, WARM, FORKED])
def test_two_ranks_draw_alike_what_they_draw_alike_under_torchrun(reports: Reports, how: str) -> None:
    """And nothing else: what one draws unseeded the other does not draw, nor the same rank in another life."""

    def alike(one: dict[str, object], other: dict[str, object]) -> dict[str, object]:
        return {"drawn": {name: value == other["drawn"][name] for name, value in one["drawn"].items()}}  # type: ignore[attr-defined,index]

    expected = alike(*reports[PLAIN])
    found = differences(expected, alike(*reports[how]), warm=how == FORKED)
    for before in (WARM, PLAIN) if how == FORKED else (PLAIN,):
        found += differences(expected, alike(reports[before][0], reports[how][0]), warm=how == FORKED)
    assert not found, "\n".join(dict.fromkeys(found))


# -- ways to leave ----------------------------------------------------------------------------------------------------------


LIVES = ("raise with all open", "SIGTERM")
"""Ways that ranks themselves take; the second start that fails is the last one without a pause."""
_TORCHRUN_SAYS = re.compile(r"failed \(exitcode: (-?\d+)\)()")
_WE_SAY = re.compile(
    r"^mt-resilient (?:[\d-]+ )?[\d:]+ rank 0 on \S+ (?:exited with code (\d+)|was killed by signal (\d+))", re.M
)


def told(run: Run) -> dict[str, dict[str, str]]:
    """What is left in the files of each way, by way and kind of file."""
    found: dict[str, dict[str, str]] = {}
    for file in sorted(run.out.glob("*.*")):
        way, _, kind = file.name.rpartition(".")
        found.setdefault(way, {})[kind] = run.read(file.name) if file.is_file() else "a folder"
    return found


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    """By how it was started: of each way to leave, what it has written and the exit code; and the exit codes of ranks, as they are told."""
    place = tmp_path_factory.mktemp("ending")
    runs = {how: Run(place, how) for how in (PLAIN, COLD, WARM)}
    for how, run in runs.items():
        if how != WARM:
            without_torch(run.here / "ending.py")
        before = {PLAIN: LIVES, COLD: (), WARM: ("trains", *LIVES)}[how]
        run.start("ending.py", str(run.out), *before, "each", lives=1 + len(before))
    runs[WARM].kill_once_warm()
    found: dict[str, dict[str, object]] = {}
    for how, run in runs.items():
        run.end()
        assert run.process.returncode == 0, run.said
        found[how] = {"said": run.said, "codes": run.report("codes"), "files": told(run)}
        says = (_TORCHRUN_SAYS if how == PLAIN else _WE_SAY).findall(run.said)
        found[how]["ranks"] = [int(left or f"-{killed}") for left, killed in says]
    assert runs[WARM].launches == ["warm"] * 3
    return found


@pytest.mark.variant
@pytest.mark.parametrize("how", [pytest.param(COLD, marks=pytest.mark.variant), WARM])
def test_a_rank_leaves_as_under_torchrun(endings: dict[str, dict[str, object]], how: str) -> None:
    """In whatever way; those that a life has taken have left a second line in their files."""
    plain, ours = ({**endings[each], "ranks": [], "said": ""} for each in (PLAIN, how))
    if how == COLD:
        for seen in (plain, ours):
            seen["files"] = {way: files for way, files in seen["files"].items() if way not in LIVES}  # type: ignore[attr-defined]
    found = differences(plain, ours, warm=how == WARM)
    assert not found, "\n".join(found)
    assert ours["codes"] == {way: code for way, (code, _) in WAYS.items()}


@pytest.mark.variant
def test_the_exit_codes_of_ranks_are_told_as_by_torchrun(endings: dict[str, dict[str, object]]) -> None:
    codes = [WAYS[way][0] for way in LIVES]
    assert endings[PLAIN]["ranks"] == codes, endings[PLAIN]["said"]
    assert endings[WARM]["ranks"] == [-9, *codes], endings[WARM]["said"]


# -- what imports leave behind ----------------------------------------------------------------------------------------------


def littered(place: Path, how: str, kind: str, sources: dict[str, str], **given: int) -> Run:
    """Start a script that imports `sources` as modules, behind torch."""
    run = Run(place, how)
    lines = ["import torch", "SCALE = 0.5", "from fresh import littered"]
    for number, source in enumerate(sources.values()):
        (run.here / f"{kind}_{number}.py").write_text(textwrap.dedent(source))
        lines.append(f"import {kind}_{number}")
    (run.here / "train.py").write_text("\n".join([*lines, f"littered.main('{kind}_')\n"]))
    return run.start("train.py", str(run.out), "trains" if how == WARM else "tells", lives=2, **given)


def forked(run: Run) -> list[dict[str, object]]:
    """What the ranks of its second life tell, which was forked."""
    run.kill_once_warm().end()
    assert run.process.returncode == 0, run.said
    assert run.launches == ["warm"], run.said
    return [run.report(file.stem + ".life2") for file in sorted(run.out.glob("*.life2"))]


@pytest.mark.variant
def test_what_a_fork_keeps_is_as_in_a_fresh_interpreter(tmp_path: Path) -> None:
    runs = [littered(tmp_path, how, "kept", KEPT_BY_A_FORK) for how in (PLAIN, WARM)]
    (ours,) = forked(runs[1])
    plain = runs[0].end().report("rank0.life1")
    for run, seen in zip(runs, (plain, ours), strict=True):
        stderr, stdout = run.said, run.printed
        if run is runs[1]:  # the first life is torchrun's own start
            stderr = stderr.partition("generation 2")[2]
            stdout = stdout.removeprefix("printed at import\n")
        texts = {"on_stderr": stderr, "on_stdout": stdout}
        for number, title in enumerate(KEPT_BY_A_FORK):
            told = seen[title] = seen.pop(f"kept_{number}")
            if not isinstance(told, dict):
                continue
            for stream in texts.keys() & told.keys():
                assert texts[stream].count(told.pop(stream)) == 1, title
            if "at_exit" in told:
                told["at_exit"] = run.read(told["at_exit"])
    assert ours == plain


@pytest.mark.variant
@pytest.mark.parametrize(
    ("title", "seen", "ranks"),
    [
        ("file handlers", [1, 1], 1),
        pytest.param("rank and time", [True, True], 2, marks=pytest.mark.variant),
        pytest.param("constant of the script", 0.5, 1, marks=pytest.mark.variant),
    ],
)
def test_what_a_fork_does_not_keep_is_left_to_the_ranks(tmp_path: Path, title: str, seen: object, ranks: int) -> None:
    """Processes of their own work as well, before there is a process group."""
    run = littered(tmp_path, WARM, "litter", {title: LITTER[title]}, ranks=ranks)
    assert forked(run) == [{"litter_0": seen, "workers": [140] * 20}] * ranks
    assert re.search(
        r"will be forked; the ranks themselves run `import litter_0` \(line 4\), which .* and everything after it",
        run.said,
    )


# -- ways to start ----------------------------------------------------------------------------------------------------------


TEXT = (SCRIPTS / "script.py").read_bytes()
DOCSTRING_ENDS = TEXT.index(b'"""\n', 3) + 4


def _zipped(here: Path) -> None:
    with zipfile.ZipFile(here / "app.zip", "w") as archive:
        archive.writestr("__main__.py", re.sub(rb"(?m)^(import torch|from fresh.training .*)$", b"pass", TEXT))


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
FORKED_STYLES: dict[str, tuple[Callable[[Path], object], Sequence[str]]] = {
    "a symlink, another encoding, a __future__ of its own": (
        lambda here: (
            _put(here, "deep/er/real.py", b"# coding: cp1252\n" + FUTURE + "É = 'é'\n".encode("cp1252")),
            (here / "deep/er/train me").symlink_to("real.py"),
        ),
        ["deep/../deep/er/train me"],
    ),
    "a package": (_package, ["-m", "package"]),
    "a byte order mark, CRLF, torchrun's own logs": (
        lambda here: _put(here, "s.py", b"\xef\xbb\xbf" + TEXT.replace(b"\n", b"\r\n")),
        ["--redirects", "1", "--tee", "0:2", "--log-dir", "logs", "s.py"],
    ),
}
"""How a script is started: what is put into its folder, and torchrun's words up to the script."""
COLD_STYLES: dict[str, tuple[Callable[[Path], object], Sequence[str]]] = {
    "a folder": (lambda here: _put(here, "app/__main__.py"), ["app"]),
    "a zip file": (_zipped, ["app.zip"]),
    "a wrapper, and options of Python": (
        lambda here: _executable(
            here,
            "wrap.sh",
            f"#!/bin/sh\nexport WRAPPED=1\n{sys.executable} -c 1\n"
            f'{sys.executable} -O -W error::BytesWarning -X dev "$@"\n',
        ),
        ["--no-python", "./wrap.sh", "script.py"],
    ),
    "run by path": (lambda here: None, ["--run-path", "script.py"]),
}
"""Those whose ranks are never forked."""


def started(
    place: Path, arrange: Callable[[Path], object], *words: str, forked: bool, **extra: str
) -> tuple[list[str], list[int]]:
    """Differences of a rank of ours from one of plain torchrun, both started by `words`, and both exit codes."""
    runs = [Run(place, how, **{"PYTHONPATH": str(place / how), **extra}) for how in (PLAIN, WARM)]
    for run in runs:
        arrange(run.here)
        run.start(*(word.replace("OUT", str(run.out)) for word in words))
    if forked:
        (runs[1].out / "two lives").touch()
        runs[1].kill_once_warm()
    for run in runs:
        run.end()
    assert runs[1].launches == (["warm"] if forked else [])
    plain, ours = runs[0].report("rank0.life1"), runs[1].report(f"rank0.life{2 if forked else 1}")
    found = [line for line in differences(plain, ours, warm=forked) if not line.startswith("drawn.")]
    return found, [run.process.returncode for run in runs]


ODD = (*ARGUMENTS, os.fsdecode(b"\xff\xfe"))


@pytest.mark.parametrize("style", some_of(FORKED_STYLES))
def test_a_script_is_forked_as_torchrun_starts_it(tmp_path: Path, style: str) -> None:
    arrange, words = FORKED_STYLES[style]
    found, left = started(tmp_path, arrange, *words, "OUT", *ODD, forked=True)
    assert not found, "\n".join(found)
    assert left == [0, 0]


@pytest.mark.variant
@pytest.mark.parametrize("style", some_of(COLD_STYLES))
def test_a_script_that_is_not_forked_is_started_as_torchrun_starts_it(tmp_path: Path, style: str) -> None:
    def arrange(here: Path) -> None:
        COLD_STYLES[style][0](here)
        for script in here.rglob("*.py"):
            without_torch(script)

    found, left = started(tmp_path, arrange, *COLD_STYLES[style][1], "OUT", *ODD, forked=False)
    assert not found, "\n".join(found)
    assert left == [0, 0]


VARIABLES = {
    "PYTHONOPTIMIZE": "1",
    "PYTHONWARNINGS": "once::UserWarning,error::BytesWarning",
    "PYTHONDEVMODE": "1",
    "PYTHONHASHSEED": "7",
    "PYTHONIOENCODING": "latin-1:replace",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONSAFEPATH": "1",
    "PYTHONUNBUFFERED": "1",
    "PYTHONINTMAXSTRDIGITS": "5000",
    "PYTHONUTF8": "1",
    "PYTHONNOUSERSITE": "1",
    "LC_ALL": "C",
    "TZ": "Asia/Shanghai",
    "TMPDIR": "/var/tmp",
}


@pytest.mark.variant
def test_what_the_environment_tells_python_it_tells_a_rank_too(tmp_path: Path) -> None:
    site = b"import os\nos.environ['OF_SITECUSTOMIZE'] = '1'\n"
    # Written beforehand, or each process would compile all of torch anew: 3 s of a core, ten times.
    bytecode = {"PYTHONOPTIMIZE": "1", "PYTHONPYCACHEPREFIX": str(tmp_path / "bytecode")}
    command = [sys.executable, "-c", "import mt_resilient.cli, torch.distributed.run"]
    subprocess.run(command, env=environment(**bytecode), check=True)
    variables = VARIABLES | bytecode
    found, left = started(
        tmp_path, lambda here: _put(here, "sitecustomize.py", site), "script.py", "OUT", forked=True, **variables
    )
    assert not found, "\n".join(found)
    assert left == [0, 0]


FAULTY: dict[str, tuple[bytes, Sequence[str]]] = {
    "no Python": (b"def main(:\n    pass\n", ["script.py"]),
    "no module": (b"", ["-m", "nothing_of_the_kind"]),
}


@pytest.mark.variant
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
