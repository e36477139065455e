"""What benchmarks/race.py makes of the steps that it has seen."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import race
import race_page
import race_table
from race_table import Outcome, outcome

BEFORE = [(float(at), 0, at, 2) for at in range(11)]
"""One step a second; the newest is step 10, at 10 s."""


def test_a_restart_costs_the_time_until_a_new_step_and_the_steps_before_it_again() -> None:
    replay = [(14.0, 0, 9, 2), (15.0, 0, 10, 2)]
    steps = [*BEFORE, *replay, (16.0, 0, 11, 2), (17.0, 0, 12, 2)]
    assert outcome(steps, 10.5, 2) == Outcome(first_s=5.5, lost_s=5.0, again=2, alone=0, step_s=1.0)


def test_a_poisoned_step_counts_when_it_is_done_again() -> None:
    poisoned = [(10.6, 0, 11, 2), (11.0, 0, 9, 2), (12.0, 0, 10, 2)]
    steps = [*BEFORE, *poisoned, (13.5, 0, 11, 2), (14.5, 0, 12, 2)]
    assert outcome(steps, 10.5, 2) == Outcome(first_s=3.0, lost_s=2.5, again=2, alone=0, step_s=1.0)


def test_a_training_that_goes_on_with_fewer_ranks_loses_each_time_that_it_stops() -> None:
    steps = [*BEFORE, (15.0, 0, 11, 1), (16.0, 0, 12, 1), (20.0, 0, 13, 2), (20.1, 1, 13, 2)]
    assert outcome(steps, 10.5, 2) == Outcome(first_s=4.5, lost_s=4.0 + 3.0, again=0, alone=2, step_s=1.0)


def test_a_fault_after_which_no_new_step_comes_has_no_recovery() -> None:
    steps = [*BEFORE, (14.0, 0, 9, 2), (15.0, 0, 10, 2)]
    assert outcome(steps, 10.5, 2).first_s is None


def _run(first_s: float | None, again: int = 0, **more: object) -> dict[str, object]:
    return {"outcomes": race_table.saved([Outcome(first_s, first_s, again, 0, 0.1)]), "phases": {}, **more}


def test_targets_compare_with_torchrun_and_with_the_best_of_the_others() -> None:
    runs = {
        "ours-warm kill": _run(0.3, again=7),
        "torchrun kill": _run(4.0),
        "nvrx kill": _run(10.0),
        "dlrover kill": _run(None),
    }
    found = race_table.results(runs, ["ours-warm", "torchrun", "nvrx", "dlrover"], every=5)
    assert [(one.name, one.limit, one.met) for one in found if one.target] == [
        ("kill to first new step, warm", pytest.approx(0.4), True),
        ("kill to first new step, warm", 2.5, True),
        ("kill, steps computed again, ours-warm", 6.0, False),
    ]


def test_a_table_shows_the_range_the_bits_and_why_a_system_did_not_recover() -> None:
    runs = {"a kill": _run(0.3, equal=True), "b kill": _run(None, note="not within 60 s")}
    assert race_table.table(runs, "kill", {"a": "A", "b": "B", "c": "C"}).splitlines()[2:] == [
        "| A | **0.3 s** | **0.3 s** | **0** | equal | 1 |  |",
        "| B | - | - | - | - | 1 | not within 60 s |",
    ]


PAGE = f"the page\n{race_page.BEGIN}old\n{race_page.END}its end\n"


def test_results_of_gpus_replace_their_section_alone() -> None:
    assert race_page.put(PAGE, "cuda", "new\n") == PAGE.replace("old", "new")


def test_results_of_cpus_leave_the_section_of_the_gpus() -> None:
    template = f"a new page\n{race_page.BEGIN}{race_page.END}its new end\n"
    assert race_page.put(PAGE, "cpu", template) == f"a new page\n{race_page.BEGIN}old\n{race_page.END}its new end\n"


def test_the_first_page_has_the_section_too() -> None:
    template = f"a page\n{race_page.BEGIN}{race_page.END}its end\n"
    assert race_page.put("", "cpu", template) == template


def test_the_templates_and_the_page_have_the_marks_of_the_section() -> None:
    root = Path(__file__).parents[2]
    for page in (root / "benchmarks" / "race" / "page.md", root / "docs" / "benchmarks.md"):
        assert race_page.put(page.read_text(), "cuda", "").count(race_page.BEGIN + race_page.END) == 1


def test_later_files_of_results_add_to_the_former_and_replace_them(tmp_path: Path) -> None:
    old = {"runs": {"a kill": 1, "b kill": 1}, "reference": {}, "versions": {"a": "1"}, "settings": {"every": 5}}
    new = {"runs": {"b kill": 2}, "reference": {"none cpu": {}}, "versions": {"b": "2"}}
    for name, held in (("old", old), ("new", new)):
        (tmp_path / name).write_text(json.dumps(held))
    assert race.read([tmp_path / "old", tmp_path / "new", tmp_path / "absent"]) == {
        "runs": {"a kill": 1, "b kill": 2}, "reference": {"none cpu": {}}, "versions": {"a": "1", "b": "2"}, "settings": {"every": 5},
    }  # fmt: skip


def _environment(venvs: Path, package: str, version: str) -> None:
    info = venvs / package / "lib" / "python3" / "site-packages" / f"{package.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")


@pytest.mark.parametrize(("version", "has"), [("0.4.1", "--ft-restart-policy min-healthy"), ("0.7.0", "")])
def test_a_system_gets_the_flags_of_the_version_in_its_own_environment(tmp_path: Path, version: str, has: str) -> None:
    _environment(tmp_path, "nvidia-resiliency-ext", version)
    assert race.installed("nvrx-inprocess", tmp_path) == version
    assert race.flags("nvrx-inprocess", tmp_path) == has
    assert race.flags("torchft", tmp_path) == ""
