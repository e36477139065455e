"""The journal: one line each, whatever happens to the file."""

from pathlib import Path

import pytest

from mt_resilient.resilience.report.journal import Journal


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "journal.jsonl")


def kinds(journal: Journal) -> list[str]:
    return [line["kind"] for line in journal.read()]


def test_what_was_written_is_read_in_order(journal: Journal) -> None:
    journal.write("start", 1.23456, command=["torchrun", "läuft.py"], pid=4)
    journal.write("said", 2.0, sentence="two\nlines")
    assert list(journal.read()) == [
        {"at_s": 1.235, "kind": "start", "command": ["torchrun", "läuft.py"], "pid": 4},
        {"at_s": 2.0, "kind": "said", "sentence": "two\nlines"},
    ]
    assert journal.path.read_text().count("\n") == 2


def test_a_journal_that_is_not_there_is_empty(journal: Journal) -> None:
    assert kinds(journal) == []


def test_another_life_of_the_agent_appends(journal: Journal) -> None:
    journal.write("start", 1.0)
    Journal(journal.path).write("start", 2.0)
    assert kinds(journal) == ["start", "start"]


@pytest.mark.parametrize("cut", range(1, 25))
def test_a_torn_last_line_is_passed_over_and_harms_no_other(journal: Journal, cut: int) -> None:
    journal.write("first", 1.0)
    journal.write("torn", 2.0)
    whole = journal.path.read_bytes()
    journal.path.write_bytes(whole[:-cut])
    assert kinds(journal) == ["first"] + ["torn"] * (cut == 1)
    journal.write("after", 3.0)
    assert kinds(journal) == ["first"] + ["torn"] * (cut == 1) + ["after"]


def test_what_is_no_event_is_passed_over(journal: Journal) -> None:
    journal.write("first", 1.0)
    with journal.path.open("ab") as file:
        file.write(b"\xff\xfe\n")
        file.write(
            b'[1]\nnull\n{}\n{"kind": "torn"}\n{"at_s": 2.0}\n{"kind": 1, "at_s": 2.0}\n{"kind": "k", "at_s": "2"}\n'
        )
    journal.write("after", 3.0)
    assert kinds(journal) == ["first", "after"]


def test_a_full_disk_loses_lines_and_counts_them() -> None:
    full = Journal(Path("/dev/full"))
    full.write("lost", 1.0)
    full.write("lost", 2.0, text="x" * 100_000)
    assert full.lost == 2


def test_a_directory_that_vanished_loses_lines_and_counts_them(journal: Journal) -> None:
    Journal(journal.path.parent / "gone" / "journal.jsonl").write("lost", 1.0)
    lost = Journal(journal.path.parent / "gone" / "journal.jsonl")
    lost.write("lost", 1.0)
    assert (lost.lost, kinds(lost)) == (1, [])
