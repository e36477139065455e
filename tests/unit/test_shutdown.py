"""Who wants to leave waits for the decision that lets him, but not for ever."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from mt_resilient.agent.config import AgentPolicy, PreemptionPolicy
from mt_resilient.agent.launch.ending_options import passed_on, shutdown_s
from mt_resilient.agent.loop.shutdown import WAIT_S, Leaving, budget_s
from mt_resilient.resilience.store.seat import Seat


def leaving() -> Leaving:
    there: Any = None
    return Leaving(Seat(there, there, there), "", False, there, there, there, there)


def test_who_does_not_want_to_leave_waits_for_nothing() -> None:
    stays = leaving()
    assert not stays.in_vain(1.0)
    assert not stays.in_vain(1.0 + 100 * WAIT_S)
    stays.on_signal(signal.SIGINT, None)
    assert not stays.in_vain(200 * WAIT_S)


def test_it_waits_anew_after_each_decision() -> None:
    leaves = leaving()
    leaves.on_signal(signal.SIGINT, None)
    assert not leaves.in_vain(100.0)
    assert not leaves.in_vain(100.0 + WAIT_S)
    leaves.decided()
    assert not leaves.in_vain(101.0 + WAIT_S)
    assert leaves.in_vain(102.0 + 2 * WAIT_S)


@pytest.mark.parametrize(
    ("options", "environ", "preempted", "given", "expected_s"),
    [
        ([], {}, True, {}, 25.0),
        ([], {}, False, {}, 0.0),
        (["--shutdown-timeout", "300"], {}, True, {}, 300.0),
        (["--tee=3", "--shutdown_timeout=300"], {}, False, {}, 300.0),
        (["--shutdown-timeout", "30"], {}, True, {}, 30.0),
        (["--shutdown-timeout", "30"], {}, False, {}, 0.0),
        (["--shutdown-timeout", "5"], {}, True, {}, 25.0),
        ([], {"PET_SHUTDOWN_TIMEOUT": "300"}, True, {}, 300.0),
        ([], {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "300"}, True, {}, 300.0),
        ([], {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "300"}, False, {"stop_grace_s": 20.0}, 0.0),
        (["--shutdown-timeout", "40"], {"PET_SHUTDOWN_TIMEOUT": "300"}, True, {}, 40.0),
        (["--shutdown-timeout", "300"], {}, True, {"budget_s": 100.0}, 100.0),
        (["--shutdown-timeout", "none"], {}, True, {}, 25.0),
    ],
)
def test_ranks_that_save_by_themselves_have_the_time_that_torchrun_gives_them(
    options: list[str], environ: dict[str, str], preempted: bool, given: dict[str, float], expected_s: float
) -> None:
    """Unless the user has set ours."""
    policy = AgentPolicy(**{name: value for name, value in given.items() if name == "stop_grace_s"})  # type: ignore[arg-type]
    preemption = PreemptionPolicy(**{name: value for name, value in given.items() if name == "budget_s"})  # type: ignore[arg-type]
    assert budget_s(policy, preemption, shutdown_s(options, environ), preempted=preempted) == expected_s


T, U, X = signal.SIGTERM, signal.SIGUSR1, signal.SIGXCPU


@pytest.mark.parametrize(
    ("options", "environ", "expected"),
    [
        ([], {}, {signal.SIGINT, T, signal.SIGHUP, signal.SIGQUIT}),
        (["--signals-to-handle", "SIGTERM, SIGUSR1"], {}, {T, U}),
        (["--signals_to_handle=SIGXCPU,SIGTERM"], {"PET_SIGNALS_TO_HANDLE": "SIGUSR1"}, {X, T}),
        ([], {"PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGUSR1"}, {T, U}),
        (
            ["--signals-to-handle", "SIGTERM,SIGCHLD,SIGKILL,SIGNONE"],
            {},
            {T},
        ),  # an agent cannot, or must not, end at them
    ],
)
def test_the_signals_that_ranks_get_are_those_of_torchrun(
    options: list[str], environ: dict[str, str], expected: set[signal.Signals]
) -> None:
    assert passed_on(options, environ) == expected
