"""The command line: exit codes, and one line for each way to use it wrongly."""

import json
import os
import time
from importlib.metadata import version
from pathlib import Path

import pytest

from mt_resilient.agent.launch import handover
from mt_resilient.agent.policies import SECTIONS
from mt_resilient.cli import main
from mt_resilient.resilience.report.journal import Journal
from mt_resilient.resilience.store.codec import dumps

from .worlds import incident

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


COMMAND = ["--", "torchrun", "train.py"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["run"], "no command was given; write it after two dashes"),
        (["run", "--"], "no command was given; write it after two dashes"),
        (["run", "torchrun", "train.py"], "the command goes after two dashes: mt-resilient run -- torchrun train.py"),
        (["run", "torchrun", "--nproc-per-node", "2", "train.py"], "two dashes"),
        (["run", "--", "deepspeed", "train.py"], "deepspeed starts the ranks by itself"),
        (["run", "--", "torchrun", "missing.py"], "the script missing.py is not there"),
        (["run", "--", "torchrun", "--version", "train.py"], "--version is no option of torchrun"),
        (["run", "--frobnicate", *COMMAND], "unrecognized arguments: --frobnicate"),
        (["run", "--metrics-port", "many", *COMMAND], "argument --metrics-port: invalid int value: 'many'"),
        (["run", "--metrics-port", "-1", *COMMAND], "agent.metrics_port is -1"),
        (["run", "--snapshot-every", "-1", *COMMAND], "snapshots.every_steps is -1; it must be at least 0"),
        (["run", "--set", "nonsense", *COMMAND], "--set nonsense: write it as --set section.key=value"),
        (
            ["run", "--set", "snapshot.slots=3", *COMMAND],
            "--set snapshot.slots: there is no such name; did you mean snapshots?",
        ),
        (
            ["run", "--set", "snapshots.slot=3", *COMMAND],
            "--set snapshots.slot: there is no such name; did you mean slots?",
        ),
        (["run", "--set", "snapshots.slots=x", *COMMAND], "snapshots.slots is 'x'; it must be a whole number"),
        (["run", "--config", "missing.toml", *COMMAND], "cannot read the configuration missing.toml: No such file"),
        (["run", "--label", "r1", *COMMAND], "control.labels has 'r1'; write KEY=VALUE, as rack=r1"),
        (
            ["run", "--label", "rack=r1", "--label", "rack=r2", *COMMAND],
            "control.labels has rack=r1 and rack=r2; write one of them",
        ),
        (["frobnicate"], "invalid choice: 'frobnicate'"),
        (["--frobnicate"], "unrecognized arguments: --frobnicate"),
        (["status"], "there is no run under"),
        (["explain"], "there is no run under"),
        (["explain", "--run-dir", "nowhere"], "nowhere is no run directory"),
        (["rewind"], "the following arguments are required: --to"),
        (["rewind", "--to", "-1"], "argument --to: '-1' is neither a step nor a snapshot's name"),
        (["rewind", "--to", "ten"], "argument --to: 'ten' is neither a step nor a snapshot's name"),
        (["rewind", "--to", "10"], "there is no run under"),
        (["snapshot"], "the following arguments are required: when"),
        (["snapshot", "later"], "invalid choice: 'later'"),
        (["drain"], "the following arguments are required: NODE"),
        (["pause"], "there is no run under"),
        (["snapshots"], "the following arguments are required: action"),
        (["snapshots", "frob"], "invalid choice: 'frob'"),
        (["snapshots", "frob"], "see: mt-resilient snapshots --help"),
        (["snapshots", "ls"], "there is no run under"),
        (["snapshots", "ls", "--all"], "there is no run under"),
        (["snapshots", "keep", "3"], "there is no run under"),
        (["snapshots", "rm"], "the following arguments are required: snapshot"),
        (["snapshots", "rm", "3"], "there is no run under"),
        (["snapshots", "export", "3", "--to", "zip", "out"], "invalid choice: 'zip'"),
        (["snapshots", "export", "3", "--to", "dcp"], "the following arguments are required: DIR"),
        (["snapshots", "export", "3", "--to", "safetensors", "out"], "there is no run under"),
        (["snapshots", "import", "--from", "dcp", "src"], "say where the snapshot goes with --snapshots DIR|URL"),
        (
            ["snapshots", "import", "--from", "megatron", "src", "--snapshots", "x"],
            "src is not a Megatron checkpoint",
        ),
    ],
)
def test_wrong_usage_exits_with_2_and_one_line(words: list[str], sentence: str, capfd: Capture, place: Path) -> None:
    assert main(words) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("mt-resilient: ")
    assert err.count("\n") == 1
    assert sentence in err
    assert [path.name for path in place.iterdir()] == ["train.py"]  # nothing was started, nothing was left


def test_the_version_is_printed_and_no_command_shows_the_help(capfd: Capture) -> None:
    assert main(["--version"]) == 0
    assert capfd.readouterr().out == f"mt-resilient {version('mt-resilient')}\n"
    assert main([]) == 0
    out, err = capfd.readouterr()
    assert all(command in out for command in ("run", "status", "explain", "snapshots"))
    assert err == ""


COMMANDS = ["run", "preflight", "status", "explain", "simulate", "rewind", "pause", "resume", "snapshot", "drain"]
COMMANDS += [
    "readmit",
    "stop",
    "completion",
    "snapshots",
    *(f"snapshots {each}" for each in ("ls", "verify", "digest", "keep", "rm", "export", "import")),
]


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_the_help_of_every_command_has_an_example(command: str, capfd: Capture) -> None:
    with pytest.raises(SystemExit) as left:
        main([*command.split(), "--help"])
    assert left.value.code == 0
    out = capfd.readouterr().out
    assert out.startswith("usage: mt-resilient")
    assert f"Example: mt-resilient {command}" in out


@pytest.mark.parametrize(("command", "more"), [("run", []), ("simulate", ["costs"])])
def test_help_lists_the_sections_of_the_configuration(command: str, more: list[str], capfd: Capture) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    out = capfd.readouterr().out
    named = [line.split()[0] for line in out.partition("configuration sections")[2].splitlines()[1:]]
    assert named == [*SECTIONS, *more]
    assert "\n  nodes       How many nodes train\n" in out


@pytest.mark.parametrize("words", [["pause"], ["stop"], ["rewind", "--to", "3", "--skip", "1"], ["drain", "here"]])
def test_an_order_to_a_job_without_an_agent_is_refused(words: list[str], place: Path, capfd: Capture) -> None:
    (place / "run").mkdir()
    (place / "run" / "journal.jsonl").write_text('{"kind": "said", "at_s": 1.0, "sentence": "the training is over"}\n')
    assert main([*words, "--run-dir", "run"]) == 2
    said = capfd.readouterr().err
    assert "no order can be sent. Its last message: the training is over" in said


def test_a_damaged_journal_still_shows_its_whole_incidents(place: Path, capfd: Capture) -> None:
    journal = Journal(place / "run" / "journal.jsonl")
    journal.path.parent.mkdir()
    journal.path.write_text('[1]\n{"kind": "incident"}\n{"kind": "incident", "at_s": 1}\n')
    journal.write("incident", 2.0, incident={"id": "1", "cause": "of another version"})
    assert main(["explain", "--run-dir", "run"]) == 0
    assert "no incident so far" in capfd.readouterr().out
    assert main(["explain", "1", "--run-dir", "run"]) == 2
    assert "there is no incident 1 in " in capfd.readouterr().err
    for number, open_ in ((1, True), (1, False), (2, True)):
        told = incident(number, signature=str(number), open=open_)
        journal.write("incident", 3.0, incident=json.loads(dumps(told)))
    assert main(["explain", "--run-dir", "run"]) == 0
    out = capfd.readouterr().out
    assert out.count("was killed by signal 9") == 2
    assert "2 incidents" in out
    assert main(["explain", "02", "--run-dir", "run"]) == 0
    assert capfd.readouterr().out.count("was killed by signal 9") == 1
    for unknown in ("0", "3", "x", "-"):
        assert main(["explain", unknown, "--run-dir", "run"]) == 2
        assert "known are 1 to 2" in capfd.readouterr().err
    assert main(["status", "--run-dir", "run"]) == 1


@pytest.mark.parametrize(
    ("pid", "code", "sentence"),
    [(os.getpid(), 0, "An agent is running"), (2**22 + 1, 1, "No agent")],
    ids=["there", "gone"],
)
def test_the_status_of_a_job_whose_etcd_does_not_answer(
    pid: int, code: int, sentence: str, place: Path, capfd: Capture
) -> None:
    Journal(place / "journal.jsonl").write("start", 1.0)
    (place / "endpoint").write_text(json.dumps({"pid": pid, "job": "train", "endpoints": ["127.0.0.1:1"]}))
    assert main(["status", "--run-dir", str(place)]) == code
    said = capfd.readouterr().out
    assert said.startswith(sentence)
    assert ("its etcd does not answer" in said) is (not code)
    assert "training continues" not in said
    assert main(["status", "--json", "--run-dir", str(place)]) == code
    assert json.loads(capfd.readouterr().out)["running"] is (not code)


def test_the_status_of_a_job_that_has_ended_shows_its_last_message(place: Path, capfd: Capture) -> None:
    """Of one that was started on several hosts from here, what its agents have said."""
    own, far = Journal(place / "journal.jsonl"), Journal(place / "nodes" / "n2" / "journal.jsonl")
    own.write("start", 1.0)
    assert main(["status", "--run-dir", str(place)]) == 1
    assert capfd.readouterr().out == f"No agent is running in {place.absolute()}.\n"
    own.write("said", 2.0, sentence="the training begins", mood="info")
    own.write("end", 3.0, code=130)
    assert main(["status", "--run-dir", str(place)]) == 1
    ended = capfd.readouterr().out
    assert f"No agent is running in {place.absolute()}. It ended with code 130. Its last message, " in ended
    assert ended.endswith(": the training begins\n")
    far.path.parent.mkdir(parents=True)
    far.write("said", 4.0, sentence="ended as asked; the same command goes on", mood="warn")
    own.write("start", 5.0)
    assert main(["status", "--run-dir", str(place)]) == 1
    again = capfd.readouterr().out
    assert "It ended" not in again
    assert "Its last message on n2, " in again
    assert again.endswith(": ended as asked; the same command goes on\n")


def test_the_time_of_an_incident_names_its_zone(place: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    Journal(place / "journal.jsonl").write("incident", 1.0, incident=json.loads(dumps(incident(1, at_s=0.0))))
    with monkeypatch.context() as here:
        here.setenv("TZ", "XST-05:45")
        time.tzset()
        assert main(["explain", "--run-dir", str(place)]) == 0
    time.tzset()
    assert "1970-01-01 05:45:00 +0545" in capfd.readouterr().out


def test_a_file_that_cannot_be_read_is_named(place: Path, capfd: Capture) -> None:
    Journal(place / "journal.jsonl").write("start", 1.0)
    (place / "endpoint").mkdir()
    assert main(["status", "--run-dir", str(place)]) == 3
    assert capfd.readouterr().err == f"mt-resilient: {place.absolute()}/endpoint: Is a directory\n"


def test_a_run_inside_a_wrapped_script_is_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its torchrun is not handed to a second agent."""
    before = dict(os.environ)
    for name, value in handover.environment([], before).items():
        monkeypatch.setenv(name, value)
    assert main(["run", "--dry-run", "--", "bash", "run.sh"]) == 0
    assert handover.WRAPS not in os.environ
    assert handover.BIN not in os.environ["PATH"]
    assert handover.SITE not in os.environ.get("PYTHONPATH", "")


def test_what_a_script_said_does_not_reach_the_terminal_as_control_characters(place: Path, capfd: Capture) -> None:
    journal = Journal(place / "journal.jsonl")
    journal.write("start", 1.0)
    journal.write("progress", 2.0, state="training", step=7, total=9, loss=0.5, step_s=0.25)
    journal.write("said", 3.0, sentence="the script raised: \x1b[2J\x07", mood="bad")
    journal.write("end", 4.0, code=5)
    for words in (["status"], ["status", "--watch"]):
        assert main([*words, "--run-dir", str(place)]) == 1
        said = capfd.readouterr().out
        assert "\x1b" not in said
        assert (
            "the script raised: \\x1b[2J\\x07. Act now: The job has stopped with exit code 5 after step 7 of 9." in said
        )
        assert "step 7 of 9, 250 ms a step, loss 0.5" in said
