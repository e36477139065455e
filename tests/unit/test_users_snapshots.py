"""What a person asks of the snapshots on disk: list, keep, remove, and what a rewind says before it acts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from mt_resilient.agent.cli import rewind_notice, send_request, snapshots
from mt_resilient.agent.run_directory import MARK, RunDirectory
from mt_resilient.checkpoint.backend import paths
from mt_resilient.checkpoint.backend.filesystem import Files
from mt_resilient.checkpoint.backend.paths import Attempt
from mt_resilient.checkpoint.durable import catalog, commit
from mt_resilient.cli import main
from mt_resilient.resilience.errors import MachineError, SnapshotError, StoreUnavailable, UsageError
from mt_resilient.resilience.model.generation import RewindOrder
from mt_resilient.resilience.model.request import Answer, Request, Wish
from mt_resilient.resilience.model.state_machine import Phase
from mt_resilient.resilience.model.types import Step
from mt_resilient.resilience.store.codec import dumps, loads
from mt_resilient.resilience.store.keys import Keys
from mt_resilient.resilience.store.protocol import Compare, Operation, Put

from ..memory_store import MemoryStore
from .worlds import A, record, status, world

RUN = "5f0c91aa"


def name(step: int, rewinds: int = 0) -> str:
    return f"{step:010d}-g1-{RUN}{rewinds:04x}"


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """Steps 10 and 20 are used; 30 and 40 were left by an order, of which 30 was ordered; 50 was found wrong."""
    root = Files(tmp_path)
    root.write("journal.jsonl", b"")
    (root / paths.SNAPSHOTS).write(MARK, b"ours")
    for step in (10, 20, 30, 40, 50):
        (root / paths.SNAPSHOTS / name(step)).write(paths.COMMIT, b"")
    commit.mark(root / paths.SNAPSHOTS / name(30), paths.ORDERED)
    for step in (30, 40):
        commit.leave(root / paths.SNAPSHOTS / name(step), "an order went back to step 20", 1e9)
    commit.reject(root / paths.SNAPSHOTS / name(50), "a checksum does not match", 0.0)
    return RunDirectory(tmp_path)


def command(run: RunDirectory, *words: str) -> int:
    return main(["snapshots", *words, "--run-dir", str(run.root)])


def steps(run: RunDirectory) -> list[int]:
    seen = catalog.look(run.kept())
    return sorted(attempt.stamp.step for attempt in (*seen.durable, *seen.left, *seen.rejected))


def test_what_is_set_aside_is_listed_with_the_reason(run: RunDirectory, capfd: pytest.CaptureFixture[str]) -> None:
    assert command(run, "ls") == 0
    assert name(30) not in capfd.readouterr().out
    assert command(run, "ls", "--all") == 0
    told = capfd.readouterr().out
    good, _, wrong = told.partition("set aside, and never used again: a checksum does not match")
    assert (
        "set aside, and good (mt-resilient rewind --to NAME comes back to one): an order went back to step 20" in good
    )
    assert f"{name(30)}  set aside at {datetime.fromtimestamp(1e9):%Y-%m-%d}" in good
    assert [line.endswith(", ordered") for line in good.splitlines() if name(30) in line or name(40) in line] == [
        False,
        True,
    ]
    assert name(50) in wrong
    assert command(run, "ls", "50", "--all") == 0
    assert name(30) not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["rm", "60"], "no snapshot 60 in"),
        (["rm", "30", "nonsense"], "no snapshot nonsense in"),
        (["rm", "10", "20"], "is the last snapshot from which this job can continue"),
        (["keep", "60"], "no snapshot 60 in"),
    ],
)
def test_a_wrong_removal_is_a_sentence_and_removes_nothing(
    run: RunDirectory, capfd: pytest.CaptureFixture[str], words: list[str], sentence: str
) -> None:
    assert command(run, *words) == 2
    assert sentence in capfd.readouterr().err
    assert steps(run) == [10, 20, 30, 40, 50]


def test_what_is_kept_is_removed_only_after_that_was_undone(
    run: RunDirectory, capfd: pytest.CaptureFixture[str]
) -> None:
    assert command(run, "keep", "30") == 0
    assert command(run, "rm", "10", "30") == 2
    assert (
        f"{name(30)} is kept. First undo that: mt-resilient snapshots keep {name(30)} --undo" in capfd.readouterr().err
    )
    assert steps(run) == [10, 20, 30, 40, 50]
    assert command(run, "keep", name(30), "--undo") == 0
    assert command(run, "rm", "10", str(Path(run.root) / paths.SNAPSHOTS / name(30)), "50") == 0
    assert steps(run) == [20, 40]


def test_to_undo_keep_leaves_the_mark_of_an_order(run: RunDirectory, capfd: pytest.CaptureFixture[str]) -> None:
    snapshot = run.kept() / paths.SNAPSHOTS / name(30)
    commit.mark(snapshot, paths.ORDERED)
    assert command(run, "keep", "30") == 0
    assert command(run, "keep", "30", "--undo") == 0
    assert f"{name(30)} is deleted when snapshots.keep_own_h are over" in capfd.readouterr().out
    assert snapshot.there(paths.ORDERED)
    assert not snapshot.there(paths.KEPT)


def test_what_a_process_reads_is_not_removed(run: RunDirectory, capfd: pytest.CaptureFixture[str]) -> None:
    with commit.reading(run.kept() / paths.SNAPSHOTS / name(30)):
        assert command(run, "rm", "30") == 3
    assert f"a process reads {name(30)}" in capfd.readouterr().err
    assert steps(run) == [10, 20, 30, 40, 50]


@pytest.mark.parametrize(
    ("where", "kept", "expected"),
    [
        ("20", {20}, (20, "")),
        ("15", {15}, (15, "")),  # it is in memory only
        ("25", {20}, (25, "")),  # the controller says which are near
        ("40", {20}, (40, name(40))),
        ("40", {20, 40}, (40, "")),  # the lineage has it again
        (name(40), {20, 40}, (40, name(40))),
        (name(20), {20}, (20, "")),
    ],
)
def test_a_step_is_of_the_lineage_first(
    run: RunDirectory, where: str, kept: set[Step], expected: tuple[int, str]
) -> None:
    step, left = rewind_notice.target(where, catalog.look(run.kept()), kept, run)
    assert (step, str(left or "")) == expected


@pytest.mark.parametrize(
    ("where", "sentence"),
    [
        ("50", "is never used again: a checksum does not match. Nothing was done"),
        (name(50), "is never used again: a checksum does not match. Nothing was done"),
        (name(60), "no snapshot 0000000060"),
        ("30", "2 snapshots are of step 30; nothing was done. Name one"),
    ],
)
def test_what_must_not_be_used_is_refused(run: RunDirectory, where: str, sentence: str) -> None:
    other = run.kept() / paths.SNAPSHOTS / name(30, rewinds=1)
    other.write(paths.COMMIT, b"")
    commit.leave(other, "an order went back to step 10", 1e9)
    with pytest.raises(UsageError, match=sentence):
        rewind_notice.target(where, catalog.look(run.kept()), set(), run)


@pytest.mark.parametrize(
    ("step", "left", "reached", "said"),
    [
        (20, "", 20, ["this order sets aside no snapshot on disk"]),
        (
            10,
            "",
            25,
            [
                f"this order sets aside the snapshot of step 20. To come back: mt-resilient rewind --to {name(20)} --run-dir ",
                "the training is at step 25, and no snapshot newer than step 20 is on disk: those steps cannot be restored",
            ],
        ),
        (
            40,
            name(40),
            20,
            ["this order sets aside no snapshot on disk", "the training is at step 20, and no snapshot of it is on"],
        ),
    ],
)
def test_a_rewind_says_before_what_it_sets_aside(
    run: RunDirectory, step: int, left: str, reached: int, said: list[str]
) -> None:
    told, back = rewind_notice.notice(Step(step), Attempt.parse(left), catalog.look(run.kept()), Step(reached), run)
    assert [sentence[: len(begins)] for sentence, begins in zip(told, said, strict=True)] == said
    assert str(back) == (name(20) if "step 20" in said[0] else "None")
    assert not (run.kept() / paths.SNAPSHOTS / name(20)).there(paths.ORDERED), "nothing is ordered yet"


class Answering(MemoryStore):
    """Answers each order at once."""

    code = 0
    lost = 0
    """How many more answers to writes are lost."""

    def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> bool:
        made = super().transact(compares, operations)
        if self.lost:
            self.lost -= 1
            raise StoreUnavailable("no answer within 2 s")
        (asked,) = self.range(Keys("job").requests).values()
        answer = Answer(sentence="so be it", exit_code=self.code)
        super().transact([], [Put(Keys("job").answer(loads(Request, asked.value).id), dumps(answer))])
        return made

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("at", "code", "marked"), [(20, 0, True), (20, 2, False), (20, 3, True), (30, 2, True)])
def test_what_an_order_names_for_coming_back_is_protected_unless_the_order_is_refused(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, at: int, code: int, marked: bool
) -> None:
    store = Answering(lambda: 0.0)
    store.code = code
    monkeypatch.setattr(send_request, "EtcdStore", lambda *_, **__: store)
    monkeypatch.setattr(RunDirectory, "agent", lambda _: {"job": "job", "endpoints": [], "pid": 1})
    back = run.kept() / paths.SNAPSHOTS / name(at)
    assert send_request.order(run, Request(kind=Wish.REWIND, step=Step(10)), back) == code
    assert back.there(paths.ORDERED) == marked


def test_an_order_that_etcd_takes_without_an_answer_is_not_given_twice(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Answering(lambda: 0.0)
    store.lost = 3
    monkeypatch.setattr(send_request, "EtcdStore", lambda *_, **__: store)
    monkeypatch.setattr(send_request, "sleep", lambda _: None)
    monkeypatch.setattr(RunDirectory, "agent", lambda _: {"job": "job", "endpoints": [], "pid": 1})
    assert send_request.order(run, Request(kind=Wish.REWIND, step=Step(10), skip=5)) == 0
    assert capsys.readouterr().out == "so be it\n"
    assert len(store.range(Keys("job").requests)) == 1, "a write that is made later must find the key"
    store.lost = 100
    monkeypatch.setattr(send_request, "sleep", interrupted)
    assert send_request.order(run, Request(kind=Wish.PAUSE)) == 130
    assert "not known whether the order has arrived" in capsys.readouterr().out


def interrupted(_: float) -> None:
    raise KeyboardInterrupt


def test_coming_back_sets_aside_nothing_of_that_lineage(run: RunDirectory) -> None:
    """Also not what an earlier order has come back to."""
    commit.take_back(run.kept() / paths.SNAPSHOTS / name(30))
    told, _ = rewind_notice.notice(Step(40), Attempt.parse(name(40)), catalog.look(run.kept()), Step(40), run)
    assert told[0] == "this order sets aside no snapshot on disk"


AGENT = {"phase": Phase.RUN, "resume_step": Step(10)}


@pytest.mark.parametrize(
    ("step", "job", "sentence"),
    [
        (10, None, ""),
        (10, {**AGENT, "phase": Phase.ENDED}, ""),
        (10, AGENT, f"the running ranks have started from {name(10)}"),
        (20, AGENT, f"after a fault the running job may continue from {name(20)}: it is the newest snapshot"),
        (15, AGENT, f"after a fault the running job may continue from {name(15)}: it is the newest certified snapshot"),
        (12, AGENT, ""),
        (30, AGENT, ""),
        (30, {**AGENT, "rewind": RewindOrder(number=1, to=Step(30), left=name(30))}, "an order to rewind goes to"),
        (30, {**AGENT, "begins": RewindOrder(number=1, to=Step(30), left=name(30))}, "an order to rewind goes to"),
    ],
)
def test_what_a_running_job_needs_is_not_removed(
    run: RunDirectory, step: int, job: dict[str, Any] | None, sentence: str
) -> None:
    for at in (12, 15):
        snapshot = run.kept() / paths.SNAPSHOTS / name(at)
        snapshot.write(paths.COMMIT, b"")
        commit.certify(snapshot) if at == 15 else None
    attempt = Attempt.parse(name(step))
    assert attempt
    told = snapshots.needed(catalog.look(run.kept()), {}, [attempt], record(**job) if job else None)
    assert told.startswith(sentence)
    assert bool(told) == bool(sentence)


@pytest.mark.parametrize(("to", "stays"), [(12, True), (20, False)])
def test_the_source_of_a_rewind_that_is_under_way_is_not_removed(run: RunDirectory, to: int, stays: bool) -> None:
    (run.kept() / paths.SNAPSHOTS / name(12)).write(paths.COMMIT, b"")
    attempt = Attempt.parse(name(12))
    assert attempt
    seen, order = catalog.look(run.kept()), RewindOrder(number=1, to=Step(to))
    told = snapshots.needed(seen, {}, [attempt], record(**AGENT), order)
    assert told.startswith("an order to rewind goes to") == stays


def test_a_snapshot_that_is_deleted_at_the_same_time_is_not_called_kept(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(place: Files, name: str, data: bytes) -> None:
        place.delete(paths.COMMIT)

    monkeypatch.setattr(Files, "write", write)
    with pytest.raises(SnapshotError, match="deleted just now"):
        snapshots.keep(run, name(20), undo=False)


def test_what_storage_refused_is_named(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise MachineError("Read-only file system")

    monkeypatch.setattr(Files, "write", refuse)
    with pytest.raises(MachineError, match="could not be marked as kept: Read-only"):
        snapshots.keep(run, name(20), undo=False)
    monkeypatch.setattr(Files, "retract", refuse)
    with pytest.raises(MachineError, match="could not be removed, or not wholly: Read-only"):
        snapshots.remove(run, [name(10)])


def test_a_waiting_order_says_once_what_delays_it(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter(range(0, 10_000, 4))
    monkeypatch.setattr(send_request, "monotonic_s", lambda: next(clock))
    monkeypatch.setattr(send_request, "sleep", lambda _: None)
    looks = iter([{"pid": 1}] * 3)
    monkeypatch.setattr(RunDirectory, "agent", lambda _: next(looks, None))
    first = Request(kind=Wish.SNAPSHOT, id="1", by="alice")
    monkeypatch.setattr(send_request, "look", lambda _: world(requests=(first,), status={A: status(stepped_s=1.0)}))
    event = {"event": "failed", "step": 9, "reason": "no space left. Free some."}
    run.journal.write_text(json.dumps({"kind": "drain", "at_s": 5.0, "event": event}) + "\n")
    asked = Request(kind=Wish.REWIND, id="2", step=Step(10), at_s=6.0)
    sending = send_request.Sending(Answering(lambda: 0.0), Keys("job"), asked)
    sending.arrived = True
    send_request._wait(run, sending, 1)
    assert capsys.readouterr().err.splitlines() == [
        send_request.UNDER_WAY,
        "first, the job carries out an earlier order: snapshot, ordered by alice",
        "the last snapshot could not be written to disk, and is tried again: no space left. Free some",
    ]
