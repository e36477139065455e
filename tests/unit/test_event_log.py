"""An agent reports each event once."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from mt_resilient.agent.cli.explain import incidents
from mt_resilient.agent.output import event_log, progress
from mt_resilient.agent.output.event_log import Telling
from mt_resilient.agent.output.progress import Progress
from mt_resilient.agent.output.terminal import Terminal
from mt_resilient.agent.run_directory import RunDirectory
from mt_resilient.resilience.ipc.board_events import PAGE_BYTES
from mt_resilient.resilience.ipc.board_layout import Page
from mt_resilient.resilience.model.generation import Decision, Quarantine
from mt_resilient.resilience.model.request import Answer
from mt_resilient.resilience.model.types import Step
from mt_resilient.resilience.plan.escalation import REWIND_IN_PLACE
from mt_resilient.resilience.report.journal import Journal
from mt_resilient.resilience.report.metrics import Metrics

from .worlds import NOW, A, B, incident, status, world


def test_one_answer_to_several_requests_is_printed_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C reaches all agents, and each of them asks for the end."""
    telling = Telling(Terminal(False), Journal(tmp_path / "journal.jsonl"), Metrics("job"))
    over = Answer(sentence="the job has ended after step 7")
    telling.decided(Decision(answers={"stop-a": over, "stop-b": over}))
    assert capsys.readouterr().err.count("the job has ended") == 1
    answered = [line["request"] for line in Journal(tmp_path / "journal.jsonl").read() if line["kind"] == "answer"]
    assert answered == ["stop-a", "stop-b"]


def test_a_readmission_is_reported_by_its_answer_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    telling = Telling(Terminal(False), Journal(tmp_path / "journal.jsonl"), Metrics("job"))
    back = Quarantine(reason="readmitted by alice", until_s=2.0, readmitted_s=2.0)
    telling.decided(Decision(quarantine={B: back}, answers={"1": Answer(sentence="node b may train again")}))
    assert capsys.readouterr().err.count("\n") == 1
    telling.decided(Decision(quarantine={B: Quarantine(reason="3 faults have struck it", until_s=9.0)}))
    assert "b is quarantined, and does not train for now: 3 faults have struck it" in capsys.readouterr().err


def test_a_node_that_did_not_lead_reads_incidents_from_etcd(tmp_path: Path) -> None:
    """This one has led for the second only, and the first was told anew meanwhile."""
    run = RunDirectory(tmp_path)
    telling = Telling(Terminal(True), Journal(run.journal), Metrics("job"))
    first, second, later = incident(1, 1, at_s=1.0), incident(2, 2, at_s=2.0), incident(3, 2, at_s=3.0, open=False)
    telling.decided(Decision(incidents=(second,)))
    assert [*incidents(run).values()] == [second]
    assert [*incidents(run, world(incidents=(first, second, later))).values()] == [first, second, later]


def test_the_incidents_of_a_leader_that_was_lost_are_read_from_its_journal_beside(tmp_path: Path) -> None:
    here, beside, another = (RunDirectory(tmp_path / "nodes" / name) for name in "abc")
    runs = ((beside, "j", 1.0), (here, "j", 2.0), (another, "another job", 3.0))
    for run, job, at_s in runs:
        run.root.mkdir(parents=True)
        (run.root / "job").write_text(job)
        told = incident(int(at_s), 1, at_s=at_s)
        Telling(Terminal(True), Journal(run.journal), Metrics("job")).decided(Decision(incidents=(told,)))
    assert {each.at_s for each in incidents(here).values()} == {1.0, 2.0}


def test_a_loss_that_no_remedy_has_brought_back_is_not_called_a_recovery(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    telling = Telling(Terminal(False), Journal(tmp_path / "journal.jsonl"), Metrics("job"))
    found = incident(1, rung=1, at=60, cause="loss_divergence", remedy="continue", resume_step=Step(40), open=False)
    telling.decided(Decision(incidents=(found,)))
    said = capsys.readouterr().err
    assert "not cured: the training continues from step 40; 20 steps computed again" in said
    assert "recovered" not in said


def test_an_incident_whose_cause_changes_is_listed_once(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    telling = Telling(Terminal(True), Journal(run.journal), Metrics("job"))
    telling.decided(Decision(incidents=(incident(1, signature="script_raised", cause="script_raised"),)))
    telling.decided(Decision(incidents=(incident(1, signature="agent_lost", cause="agent_lost"),)))
    assert [each.cause for each in incidents(run).values()] == ["agent_lost"]


def test_the_leader_alone_writes_the_course_of_the_training(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    page = Page(memoryview(bytearray(PAGE_BYTES)))
    page.beat(12, 0.5, 1.0, 1)
    page.stepped_ns = page.generation = 1
    telling = Telling(Terminal(True), journal, Metrics("job"))
    telling.count([page], None, None)
    assert [*journal.read()] == [], "it does not lead"
    telling = Telling(Terminal(True), journal, Metrics("job"))
    telling.progress.stored(0.002)
    telling.count([page], None, world(status={A: status(min_step=10, max_step=10, alive=2, stepped_s=NOW)}))
    telling.count([page], None, world())
    (line,) = journal.read()
    told = (line["kind"], line["state"], line["step"], line["loss"], line["etcd_s"], line["nodes"])
    assert told == ("progress", "training", 12, 0.5, 0.002, {"trains": 1}), (
        "its own ranks' step is newer than the status"
    )


def test_a_clock_that_jumps_steers_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wall, passed = [NOW], [0.0]
    monkeypatch.setattr(progress, "wall_s", lambda: wall[0])
    monkeypatch.setattr(progress, "monotonic_s", lambda: passed[0])
    reported = Progress(Journal(tmp_path / "journal.jsonl"), Metrics("job"))
    for clock, since in ((NOW, 10.0), (NOW - 3600, 20.0), (NOW + 3600, 80.0)):
        wall[0], passed[0] = clock, since
        reported.look(world(status={A: status(min_step=10, max_step=10, alive=2, stepped_s=NOW)}), ())
    lines = [*Journal(tmp_path / "journal.jsonl").read()]
    assert [line["spent"] for line in lines] == [{"training": 10.0}, {"training": 20.0}, {"training": 80.0}]
    assert [line["at_s"] for line in lines] == [NOW, NOW - 3600, NOW + 3600]


def test_steps_that_are_repeated_after_a_rewind_in_place_are_no_useful_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed = [0.0]
    monkeypatch.setattr(progress, "monotonic_s", lambda: passed[0])
    reported = Progress(Journal(tmp_path / "journal.jsonl"), Metrics("job"))
    fault = incident(rung=REWIND_IN_PLACE, at=30, resume_step=Step(20), phases_s={"restore": 0.5})
    for since, step in ((10.0, 10), (20.0, 30), (80.0, 100)):
        passed[0] = since
        reported.look(world(status={A: status(min_step=step, max_step=step, alive=2, stepped_s=NOW)}), ())
        if step == 30:  # half a second a step
            reported.recovered([fault])
    *_, line = Journal(tmp_path / "journal.jsonl").read()
    assert line["spent"] == {"training": 74.5, "restore": 0.5, "replay": 5.0}


def test_a_snapshot_is_as_old_as_its_first_sight_in_any_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wall = [0.0]
    monkeypatch.setattr(progress, "wall_s", lambda: wall[0])
    monkeypatch.setattr(progress, "monotonic_s", lambda: wall[0])
    reported = Progress(Journal(tmp_path / "journal.jsonl"), Metrics("job"))
    for at, kept in (
        (NOW, {"memory_steps": (Step(10),)}),
        (NOW + 100, {"memory_steps": (Step(110),), "durable_steps": (Step(10),), "certified_steps": (Step(10),)}),
    ):
        wall[0] = at
        reported.look(world(status={A: status(min_step=110, max_step=110, alive=2, stepped_s=NOW, **kept)}), ())
    *_, line = Journal(tmp_path / "journal.jsonl").read()
    assert {tier: at_s for tier, (_, at_s) in line["snapshots"].items()} == {
        "memory": NOW + 100,
        "other node": 0.0,
        "disk": NOW,
        "certified": NOW,
    }


def test_a_spare_that_leads_reports_the_step_of_the_members(tmp_path: Path) -> None:
    page = Page(memoryview(bytearray(PAGE_BYTES)))
    seen = world(status={A: status(min_step=110, max_step=110, alive=2, stepped_s=NOW)})
    Progress(Journal(tmp_path / "journal.jsonl"), Metrics("job")).look(seen, [page])
    [line] = Journal(tmp_path / "journal.jsonl").read()
    assert line["step"] == 110


def test_the_loss_is_that_of_the_first_rank_that_knows_it(tmp_path: Path) -> None:
    pages = [Page(memoryview(bytearray(PAGE_BYTES))) for _ in range(2)]
    for page, loss in zip(pages, (math.nan, 0.5), strict=True):  # of a pipeline, the last stage alone
        page.beat(12, loss, 1.0, 1)
        page.stepped_ns = 1
    metrics = Metrics("job")
    Progress(Journal(tmp_path / "journal.jsonl"), metrics).look(None, pages)
    assert metrics.registry.get_sample_value("mt_resilient_loss", {"job": "job"}) == 0.5


def test_a_clock_that_jumps_changes_no_share_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wall, passed = [NOW], [0.0]
    monkeypatch.setattr(event_log, "wall_s", lambda: wall[0])
    monkeypatch.setattr(event_log, "monotonic_s", lambda: passed[0])
    metrics = Metrics("job")
    telling = Telling(Terminal(True), Journal(tmp_path / "journal.jsonl"), metrics)
    told = status(min_step=10, max_step=10, alive=2, stepped_s=NOW)
    for clock, since, paused in ((NOW - 9, 10.0, False), (NOW + 3600, 40.0, True), (NOW - 3600, 50.0, False)):
        wall[0], passed[0] = clock, since
        telling.count([], replace(told, paused=paused), None)
    assert metrics.registry.get_sample_value("mt_resilient_effective_training_time_ratio", {"job": "job"}) == 0.5


def test_a_recovery_that_another_fault_interrupted_is_counted_and_not_called_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = Metrics("job")
    telling = Telling(Terminal(False), Journal(tmp_path / "journal.jsonl"), metrics)
    telling.decided(Decision(incidents=(incident(1, phases_s={"stop": 0.25}, open=False),)))
    labels = {"job": "job", "cause": "rank_killed", "rung": "2", "result": "interrupted"}
    assert metrics.registry.get_sample_value("mt_resilient_recoveries_total", labels) == 1
    assert "recovered" not in capsys.readouterr().err
