"""What ranks find in their environment."""

import math

import pytest

from mt_resilient.resilience.errors import InternalError
from mt_resilient.resilience.inprocess.tally import RankPolicy
from mt_resilient.resilience.ipc.handoff import VARIABLE, Handoff, Reached
from mt_resilient.resilience.model.types import Generation, Step

HANDOFF = Handoff(
    generation=Generation(2),
    board="/proc/4/fd/5",
    arena=(("/proc/4/fd/6", "/proc/4/fd/7"), ("/proc/4/fd/8", "/proc/4/fd/9")),
    snapshots="/data/läufe/run 1",
    resume_step=Step(10),
    replay_until=Step(-1),
    reached=(Reached(12, 0.1, math.nan),),
    origin="",
    every_steps=1,
    durable_every_steps=50,
    reach_steps=100,
    policy=RankPolicy(),
    turns=(),
    windows=(),
    modules="modules.json",
)


def test_there_and_back() -> None:
    environment = HANDOFF.to_environment()
    assert set(environment) == {VARIABLE}
    assert environment[VARIABLE].isascii()
    assert repr(Handoff.from_environment({**environment, "PATH": "/bin"})) == repr(HANDOFF)  # NaN is unequal to itself


@pytest.mark.parametrize("environment", [{}, {VARIABLE: ""}, {"PATH": "/bin"}])
def test_outside_of_a_run_there_is_none(environment: dict[str, str]) -> None:
    assert Handoff.from_environment(environment) is None


@pytest.mark.parametrize("text", ["yes", "{}", "[]"])
def test_what_cannot_be_read_is_our_error(text: str) -> None:
    with pytest.raises(InternalError, match="Handoff"):
        Handoff.from_environment({VARIABLE: text})
