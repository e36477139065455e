"""What the page's reader makes of journals: of one agent or several, that end, are started again, or are damaged."""

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest

from mt_resilient.agent.cli.run_reader import RunReader
from mt_resilient.agent.run_directory import RunDirectory
from mt_resilient.resilience.report.journal import Journal
from mt_resilient.resilience.store.etcd.access import Papers

from .worlds import incident


def journal(root: Path, *lines: tuple[float, str, dict[str, object]]) -> Path:
    """Add lines to the journal in `root`: time, kind, and fields."""
    root.mkdir(exist_ok=True)
    for at_s, kind, fields in lines:
        Journal(root / "journal.jsonl").write(kind, at_s, **fields)
    return root


def reader(*roots: Path) -> RunReader:
    found = RunReader([RunDirectory(root) for root in roots])
    found.look()
    return found


START = {"command": ["torchrun"], "several": True}


def training(step: int, seconds: float, state: str = "training") -> dict[str, object]:
    return {"state": state, "step": step, "spent": {"training": seconds}}


def test_the_end_of_one_node_is_not_the_end_of_the_job(tmp_path: Path) -> None:
    leads = journal(tmp_path / "a", (0.0, "start", START), (50.0, "progress", training(9, 50.0)))
    drained = journal(tmp_path / "b", (1.0, "start", START), (60.0, "end", {"code": 0}))
    assert not reader(leads, drained).over
    assert reader(drained).over
    journal(leads, (70.0, "end", {"code": 0}))
    assert reader(leads, drained).over
    journal(drained, (80.0, "progress", training(10, 1.0)))
    assert not reader(leads, drained).over, "the drained node led, and another one leads now"
    journal(drained, (90.0, "end", {"code": 0}))
    assert reader(leads, drained).over
    journal(leads, (95.0, "start", START))
    assert not reader(leads, drained).over


def test_a_node_that_died_long_before_the_end_does_not_hide_the_end(tmp_path: Path) -> None:
    leads = journal(tmp_path / "a", (0.0, "start", START), (50.0, "progress", training(9, 50.0)))
    died = journal(tmp_path / "b", (1.0, "start", START))
    assert not reader(leads, died).over
    journal(leads, (70.0, "end", {"code": 93}))
    assert reader(leads, died).over


def test_each_start_of_each_agent_has_its_own_costs(tmp_path: Path) -> None:
    first = journal(tmp_path / "a", (0.0, "start", START), (50.0, "progress", training(9, 50.0)))
    other = journal(
        tmp_path / "b",
        *((1.0, "start", START), (60.0, "progress", training(10, 10.0))),
        *((70.0, "start", START), (90.0, "progress", training(15, 20.0))),
    )
    assert [life["spent"] for life in reader(first, other).lives] == [
        {"training": 50.0},
        {"training": 10.0},
        {"training": 20.0},
    ]


@pytest.mark.parametrize(
    ("lines", "stepped_s"),
    [
        ([(10.0, training(1, 1.0)), (20.0, training(2, 1.0)), (90.0, training(2, 1.0))], 20.0),
        ([(10.0, training(1, 1.0)), (20.0, training(1, 1.0, "paused")), (90.0, training(1, 1.0))], 90.0),
        (
            [(10.0, training(1, 1.0)), (20.0, training(-1, 1.0, "recovering")), (90.0, training(1, 1.0, "starting"))],
            10.0,
        ),
        ([(10.0, training(-1, 1.0, "starting"))], 0.0),
    ],
)
def test_when_the_ranks_have_last_made_a_step(
    tmp_path: Path, lines: list[tuple[float, dict[str, object]]], stepped_s: float
) -> None:
    root = journal(tmp_path / "a", (0.0, "start", START), *((at_s, "progress", line) for at_s, line in lines))
    assert reader(root).stepped_s == stepped_s


def test_what_was_bad_before_a_start_is_past(tmp_path: Path) -> None:
    bad = (5.0, "said", {"sentence": "the disk is full", "mood": "bad"})
    root = journal(tmp_path / "a", (0.0, "start", START), bad)
    assert "bad" in reader(root).last
    assert "bad" not in reader(journal(root, (9.0, "start", START))).last


def test_lines_that_are_no_json_hide_nothing(tmp_path: Path) -> None:
    root = journal(tmp_path / "a", (0.0, "start", START))
    with (root / "journal.jsonl").open("ab") as file:
        file.write(b'{"at_s": 1, "kind": "said", "sentence": "\xff"}\n' + b"[" * 100_000 + b"\n")
    journal(root, (2.0, "progress", training(9, 1.0)))
    assert reader(root).last["progress"]["step"] == 9
    assert [line["kind"] for line in Journal(root / "journal.jsonl").read()] == ["start", "progress"]


@pytest.mark.parametrize("replace", [True, False])
def test_a_journal_that_was_replaced_is_read_anew(tmp_path: Path, replace: bool) -> None:
    root = journal(tmp_path / "a", (0.0, "start", START), *((n, "progress", training(n, 1.0)) for n in range(9)))
    told = reader(root)
    other = journal(tmp_path / "b", (5.0, "start", START), (7.0, "incident", {"incident": asdict(incident())}))
    if replace:
        os.replace(other / "journal.jsonl", root / "journal.jsonl")
    else:
        (root / "journal.jsonl").write_bytes((other / "journal.jsonl").read_bytes())
    told.look()
    assert (told.progress, [*told.incidents], told.lives[0]["from_s"]) == ([], ["1"], 5.0)


def test_an_agent_that_was_killed_here_is_gone_at_once(tmp_path: Path) -> None:
    root = journal(tmp_path / "a", (0.0, "start", {"command": [], "several": False}))
    directory = RunDirectory(root)
    directory.publish("job", ["localhost:1"], Papers())
    assert (directory.gone, reader(root).gone, reader(root).alive) == (False, False, True)
    told = directory.endpoint.read_text()
    directory.endpoint.write_text(told.replace(f'"pid": {os.getpid()}', '"pid": 4194305'))
    assert (directory.gone, reader(root).gone, reader(root).alive) == (True, True, False)
    directory.endpoint.write_text(directory.endpoint.read_text().replace('"machine": "', '"machine": "x'))
    assert not directory.gone, "it may run on another machine"
    directory.endpoint.unlink()
    assert not directory.gone


def test_what_is_damaged_hides_nothing_and_new_jobs_appear(tmp_path: Path) -> None:
    pytest.importorskip("plotly", reason="the extra `dashboard` is not installed")
    from starlette.requests import Request

    from mt_resilient.dashboard.server import Runs

    journal(tmp_path / "m", (0.0, "start", START), (1.0, "progress", {"step": "many"}), (2.0, "end", {"code": []}))
    (tmp_path / "m" / "endpoint").write_text("[1]")
    journal(tmp_path / "n", (0.0, "start", START), (50.0, "progress", training(9, 50.0)), (60.0, "end", {"code": 0}))
    runs = Runs([tmp_path], "")

    def listed() -> list[tuple[str, str]]:
        told = json.loads(runs.all(Request({"type": "http"})).body)
        return [(each["job"], each["state"]["words"].split(":")[0].partition(" for ")[0]) for each in told]

    assert listed() == [("m", "Not known"), ("n", "Not training here")]
    journal(tmp_path / "a", (0.0, "start", START), (60.0, "end", {"code": 0}))
    assert [job for job, _ in listed()] == ["m", "n", "a"], "pages that are open keep their job's number"
