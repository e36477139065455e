"""What the page's reader makes of journals: of one agent or several, that end, are started again, or are damaged."""

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest

from mt_resilient.agent.cli import send_request
from mt_resilient.agent.cli.explain import find_directory, find_running, run_roots
from mt_resilient.agent.cli.run_reader import RunReader
from mt_resilient.agent.run_directory import RunDirectory
from mt_resilient.resilience.errors import UsageError
from mt_resilient.resilience.model.request import Request, Wish
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


def test_the_nodes_of_a_job_are_found_below_the_directory_that_they_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = tmp_path / "mt-runs" / "train"
    leads, follows = (
        (job / "nodes" / name).mkdir(parents=True) or journal(job / "nodes" / name, (at_s, "start", START))
        for name, at_s in (("0-a", 1.0), ("1-b", 0.0))
    )
    os.utime(follows / "journal.jsonl", (1, 1))
    other = journal(tmp_path / "mt-runs" / "other", (0.0, "start", {}))
    os.utime(other / "journal.jsonl", (2, 2))
    monkeypatch.chdir(tmp_path)
    assert run_roots([job]) == [leads, follows]
    assert run_roots([]) == [other, leads, follows]
    assert find_directory(job).root == find_directory(None).root == leads
    journal(job, (0.0, "start", {}))  # the launcher's of a hostfile, which covers its nodes
    assert run_roots([]) == [other, job]
    assert find_directory(job).root == job


def test_an_order_goes_to_the_only_job_that_runs_and_to_none_of_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    runs = [tmp_path / "mt-runs" / name for name in ("train", "both/nodes/0-a", "both/nodes/1-b", "dead")]
    for at, root in enumerate(runs):
        root.mkdir(parents=True)
        os.utime(journal(root, (0.0, "start", START)) / "journal.jsonl", (at, at))
    *_, dead = runs
    assert find_running(None).root == dead, "none runs: the order then says so"
    for root in runs[1:3]:
        RunDirectory(root).publish("both", ["etcd:2379"], Papers())
    assert find_running(None).root == runs[1], "two nodes of one job, on this machine"
    assert capsys.readouterr().err == f"for the job both, in {runs[1]}\n"
    assert find_running(dead).root == dead
    RunDirectory(runs[0]).publish("train", ["etcd:2379"], Papers())
    with pytest.raises(UsageError, match=f"2 jobs run here.*--run-dir: {runs[1]} and {runs[0]}"):
        find_running(None)


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


def test_ranks_that_restart_leave_the_step_as_it_was(tmp_path: Path) -> None:
    root = journal(tmp_path / "a", (0.0, "start", START), (1.0, "progress", training(-1, 0.0, "starting")))
    assert reader(root).last["progress"]["step"] == -1
    journal(root, (50.0, "progress", training(9, 50.0)), (51.0, "progress", training(-1, 50.0, "recovering")))
    found = reader(root)
    assert found.last["progress"]["step"] == 9
    assert [line["step"] for line in found.progress] == [-1, 9, -1]


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


def test_an_order_to_a_job_of_several_nodes_goes_to_the_agent_on_this_machine(tmp_path: Path) -> None:
    roots = [tmp_path / "train" / "nodes" / name for name in ("0-a", "1-b", "2-c")]
    for at, root in enumerate(roots):
        root.mkdir(parents=True)
        (root / "job").write_text("one job")
        os.utime(journal(root, (0.0, "start", START)) / "journal.jsonl", (at, at))
        if at:  # node 0 has exited
            place = {"pid": 1, "born": "elsewhere", "machine": "another", "job": "train"}
            (root / "endpoint").write_text(json.dumps(place))
    leads = roots[-1]
    for given in (tmp_path / "train", leads):
        assert find_running(given).root == leads
    with pytest.raises(
        UsageError, match=r"runs on this machine; give the order on one of: 1-b, 2-c\. Nothing was done"
    ):
        send_request.order(find_running(leads), Request(kind=Wish.PAUSE))
    RunDirectory(roots[0]).publish("train", ["etcd:2379"], Papers())
    for given in (tmp_path / "train", leads):
        assert find_running(given).root == roots[0]
