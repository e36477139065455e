"""Configuration: file < environment < flag, and one clear sentence for each mistake."""

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from mt_resilient.agent.policies import SECTIONS
from mt_resilient.resilience.config import changed, load
from mt_resilient.resilience.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Oven:
    degrees: int = 180
    weight_kg: float = 1.5
    fan: bool = False
    dish: str = "bread"

    def __post_init__(self) -> None:
        if self.degrees < 0:
            raise UsageError(f"oven.degrees is {self.degrees}; it cannot be negative")


@dataclass(frozen=True, kw_only=True)
class Table:
    seats: int = 4


KITCHEN = {"oven": Oven, "table": Table}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "kitchen.toml"


def oven(file: Path | None = None, environ: dict[str, str] | None = None, **flags: str) -> Oven:
    return load(KITCHEN, file, environ or {}, {f"oven.{key}": text for key, text in flags.items()})["oven"]


def test_a_flag_precedes_the_environment_and_this_the_file(file: Path) -> None:
    assert load(KITCHEN, None, {}, {}) == {"oven": Oven(), "table": Table()}
    file.write_text("[oven]\ndegrees = 1\nweight_kg = 1\nfan = true\n[table]\nseats = 1\n")
    environ = {"MT_RESILIENT_OVEN_WEIGHT_KG": "2", "MT_RESILIENT_OVEN_DISH": "cake", "MT_RESILIENT_TABLE_SEATS": "2"}
    kitchen = load(KITCHEN, file, environ, {"oven.dish": "pie", "table.seats": "3"})
    assert kitchen == {"oven": Oven(degrees=1, weight_kg=2.0, fan=True, dish="pie"), "table": Table(seats=3)}


def test_a_whole_number_serves_as_a_number_and_as_a_text(file: Path) -> None:
    """`number = 4` of [nodes], where `number = "2:4"` is also allowed."""
    file.write_text("[oven]\nweight_kg = 2\ndish = 4\n")
    assert isinstance(oven(file).weight_kg, float)
    assert oven(file).dish == "4"


@pytest.mark.parametrize("text", ["true", "1", "Yes", "on", "false", "0", "no", "OFF"])
def test_common_spellings_of_yes_and_no_are_understood(text: str) -> None:
    fan = text in ("true", "1", "Yes", "on")
    assert oven(fan=text).fan is fan
    assert oven(environ={"MT_RESILIENT_OVEN_FAN": text}).fan is fan


def test_an_environment_variable_that_names_no_key_is_refused() -> None:
    near = "MT_RESILIENT_OVEN_DEGREE: there is no such name; did you mean MT_RESILIENT_OVEN_DEGREES?"
    with pytest.raises(UsageError, match=re.escape(near)):
        oven(environ={"MT_RESILIENT_OVEN_DEGREE": "1"})
    assert oven(environ={"MT_RESILIENT_ETCD": "/usr/bin/etcd", "OVEN_DEGREE": "1"}) == oven()  # of no section


def test_the_variables_that_kubernetes_sets_for_a_service_are_ignored() -> None:
    said = {
        "SERVICE_HOST": "10.0.0.7",
        "SERVICE_PORT": "80",
        "SERVICE_PORT_WEB": "80",
        "PORT": "tcp://10.0.0.7:80",
        "PORT_80_TCP": "tcp://10.0.0.7:80",
        "PORT_80_TCP_ADDR": "10.0.0.7",
        "DEGREES_PORT": "tcp://10.0.0.7:80",
    }
    assert oven(environ={f"MT_RESILIENT_OVEN_{name}": text for name, text in said.items()}) == oven()
    with pytest.raises(UsageError, match="no such name"):
        oven(environ={"MT_RESILIENT_OVEN_DEGREE_PORT": "80"})


def test_an_environment_variable_that_is_empty_is_a_text_and_no_number() -> None:
    assert oven(environ={"MT_RESILIENT_OVEN_DISH": ""}).dish == ""
    with pytest.raises(UsageError, match="whole number"):
        oven(environ={"MT_RESILIENT_OVEN_DEGREES": ""})


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("[oven]\ndegree = 1\n", "key oven.degree in {file}: there is no such name; did you mean degrees?"),
        ("[ovne]\ndegrees = 1\n", "section [ovne] in {file}: there is no such name; did you mean oven?"),
        ("[zzz]\n", "section [zzz] in {file}: there is no such name; known are oven, table"),
        ("[oven]\nzzz = 1\n", "key oven.zzz in {file}: there is no such name; known are degrees, weight_kg, fan, dish"),
        ("oven = 3\n", "{file}: oven must be a section, written [oven]"),
        ('[oven]\ndegrees = "hot"\n', "oven.degrees is 'hot'; it must be a whole number"),
        ("[oven]\ndegrees = 1.5\n", "oven.degrees is 1.5; it must be a whole number"),
        ("[oven]\ndegrees = true\n", "oven.degrees is True; it must be a whole number"),
        ("[oven]\ndegrees = [1]\n", "oven.degrees is [1]; it must be a whole number"),
        ('[oven]\nweight_kg = "heavy"\n', "oven.weight_kg is 'heavy'; it must be a number"),
        ("[oven]\nweight_kg = [1]\n", "oven.weight_kg is [1]; it must be a number"),
        ("[oven]\nweight_kg = false\n", "oven.weight_kg is False; it must be a number"),
        ("[oven]\nweight_kg = nan\n", "oven.weight_kg is nan; it must be a number"),
        ("[oven]\nweight_kg = inf\n", "oven.weight_kg is inf; it must be a number"),
        ("[oven]\nweight_kg.a = 1\n", "oven.weight_kg is {{'a': 1}}; it must be a number"),
        ("[oven]\nweight_kg = 2001-01-01\n", "oven.weight_kg is datetime.date(2001, 1, 1); it must be a number"),
        ("[oven]\nfan = 1\n", "oven.fan is 1; it must be true or false"),
        ('[oven]\nfan = "maybe"\n', "oven.fan is 'maybe'; it must be true or false"),
        ("[oven]\ndish = true\n", "oven.dish is True; it must be a text"),
        ("[oven]\ndish = 1.5\n", "oven.dish is 1.5; it must be a text"),
        (f"[oven]\nweight_kg = 1{'0' * 400}\n", f"oven.weight_kg is 1{'0' * 400}; it must be a number"),
        ("[oven]\ndegrees = -1\n", "oven.degrees is -1; it cannot be negative"),
    ],
)
def test_mistakes_in_the_file_are_refused(file: Path, content: str, sentence: str) -> None:
    file.write_text(content)
    with pytest.raises(UsageError) as caught:
        oven(file)
    assert str(caught.value) == sentence.format(file=file)


@pytest.mark.parametrize("content", [b"[oven\n", b"degrees\n", b'[oven]\ndish = "\xff"\n'])
def test_a_file_that_is_not_toml_is_refused(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    with pytest.raises(UsageError, match="is not TOML") as caught:
        oven(file)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_refused(file: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read the configuration .*kitchen\.toml: No such file"):
        oven(file)
    with pytest.raises(UsageError, match="Is a directory"):
        oven(file.parent)


@pytest.mark.parametrize(
    ("flag", "sentence"),
    [
        ("oven.degree", "--set oven.degree: there is no such name; did you mean degrees?"),
        ("ofen.degrees", "--set ofen.degrees: there is no such name; did you mean oven?"),
        ("degrees", "--set degrees: there is no such name; known are oven, table"),
        ("oven", "--set oven: there is no such name; known are degrees, weight_kg, fan, dish"),
    ],
)
def test_mistakes_in_a_flag_are_refused(flag: str, sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        load(KITCHEN, None, {}, {flag: "1"})
    assert str(caught.value) == sentence


def test_a_bad_value_is_named_wherever_it_comes_from() -> None:
    for how in ({"environ": {"MT_RESILIENT_OVEN_DEGREES": "hot"}}, {"degrees": "hot"}):
        with pytest.raises(UsageError, match=r"oven\.degrees is 'hot'; it must be a whole number"):
            oven(**how)


@pytest.mark.parametrize("name", SECTIONS)
def test_the_real_sections_have_types_that_a_text_can_be_read_as(name: str) -> None:
    defaults = dataclasses.asdict(SECTIONS[name]())
    flags = {f"{name}.{key}": str(value) for key, value in defaults.items()}
    assert load(SECTIONS, None, {}, flags)[name] == SECTIONS[name]()


@pytest.mark.parametrize(
    "flag",
    [
        "agent.metrics_port=-1",
        "agent.metrics_port=65536",
        "agent.lease_ttl_s=1",
        "agent.stop_grace_s=-1",
        "preemption.budget_s=0",
        "recovery.in_place_s=0",
        "control.deadline_s=0",
        "control.deadline_s=nan",
        "recovery.max_without_progress=0",
        "snapshots.slots=2",
    ],
)
def test_values_that_cannot_work_are_refused_by_name(flag: str) -> None:
    dotted, _, text = flag.partition("=")
    with pytest.raises(UsageError, match=rf"^{dotted} is '?{text}"):
        load(SECTIONS, None, {}, {dotted: text})


@pytest.mark.parametrize("name", ["SIGKILL", "SIGINT", "TERM", "15"])
def test_a_signal_that_no_scheduler_sends_ahead_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=rf"^preemption.signals has '{name}'; it may have SIGTERM, SIGUSR1"):
        load(SECTIONS, None, {}, {"preemption.signals": f"SIGTERM, {name}"})


def test_what_is_not_the_default_is_named() -> None:
    found = load(SECTIONS, None, {}, {"agent.metrics_port": "0", "hang.floor_s": "9"})
    assert changed(found) == {"agent.metrics_port": 0, "hang.floor_s": 9.0}
