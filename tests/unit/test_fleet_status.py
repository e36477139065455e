"""What becomes of a launch over ssh, by what has become of its hosts."""

import pytest

from mt_resilient.agent.ssh.fleet_status import Member, Phase, exit_code, gone, hopeless, how_lost


def members(*phases: Phase) -> tuple[Member, ...]:
    return tuple(Member(node=name, phase=phase) for name, phase in zip("abcd", phases, strict=False))


@pytest.mark.parametrize(
    ("started", "code", "phase"),
    [
        (False, 255, Phase.UNUSABLE),
        (False, 127, Phase.UNUSABLE),
        (False, 0, Phase.UNUSABLE),
        (True, 0, Phase.ENDED),
        (True, 3, Phase.ENDED),
        (True, 130, Phase.ENDED),
        (True, 255, Phase.LOST),
        (True, 137, Phase.LOST),
        (True, -9, Phase.LOST),
    ],
)
def test_ssh_s_exit_code_gives_the_phase_of_its_node(started: bool, code: int, phase: Phase) -> None:
    assert gone(started, code) is phase


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (255, "the connection broke"),
        (137, "its agent was killed"),
        (-9, "its ssh process was ended by SIGKILL"),
    ],
)
def test_how_a_node_was_lost_is_said_in_words(code: int, said: str) -> None:
    assert how_lost(code) == said


UP, LOST, NO, YET, ENDED = Phase.UP, Phase.LOST, Phase.UNUSABLE, Phase.CONNECTING, Phase.ENDED


@pytest.mark.parametrize(
    ("phases", "least", "expected"),
    [
        ((UP, UP, YET), 3, False),
        ((UP, UP, NO), 2, False),
        ((YET, YET, NO), 2, False),
        ((UP, UP, NO), 3, True),
        ((NO, NO, NO), 1, True),
        ((UP, LOST, UP), 3, False),  # it has begun: the agents decide
        ((ENDED, ENDED, LOST), 3, False),
    ],
)
def test_a_job_cannot_begin_if_too_few_hosts_are_left(phases: tuple[Phase, ...], least: int, expected: bool) -> None:
    assert bool(hopeless(members(*phases), least, begun=False)) is expected


def test_the_hosts_that_cannot_be_used_are_named() -> None:
    assert "the job needs 3 of the 4 hosts, but a, c cannot be used" in hopeless(
        members(NO, UP, NO, YET), 3, begun=False
    )


def test_an_agent_that_exits_with_an_error_counts_as_missing_until_the_job_has_begun() -> None:
    """The others would wait for it."""
    come = (*members(UP, NO, UP), Member(node="d", phase=ENDED, code=2))
    said = "the job needs 3 of the 4 hosts, but b cannot be used, the agent on d has exited with code 2; the other agents were told to exit"
    assert said in hopeless(come, 3, begun=False)
    assert not hopeless(come, 3, begun=True)
    assert not hopeless(come, 2, begun=False)


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        ([("a", ENDED, 0, 10.0), ("b", ENDED, 0, 10.1)], 0),
        ([("a", ENDED, 0, 5.0), ("b", ENDED, 93, 10.0)], 93),  # a was drained, the job went on
        ([("a", ENDED, 93, 5.0), ("b", ENDED, 0, 10.0)], 0),
        ([("a", LOST, 255, 50.0), ("b", ENDED, 0, 10.0), ("c", NO, 255, 1.0)], 0),
        ([("a", LOST, 137, 50.0), ("b", NO, 255, 10.0)], 3),
        ([("a", ENDED, 0, 10.0), ("b", LOST, 255, 9000.0)], 3),  # a was drained, and all others were lost
    ],
)
def test_the_job_s_exit_code_is_that_of_the_last_agent_to_exit(
    ends: list[tuple[str, Phase, int, float]], code: int
) -> None:
    assert exit_code([Member(node=n, phase=p, code=c, ended_s=s) for n, p, c, s in ends]) == code
