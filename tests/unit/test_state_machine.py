"""The life of a generation: the table is whole, and the documentation draws it."""

import sys
from pathlib import Path

import pytest

from mt_resilient.resilience.model.state_machine import TABLE, Event, Move, Phase

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from document_tables import diagram

ARCHITECTURE = Path(__file__).parents[2] / "docs" / "architecture.md"


def test_each_pair_is_named() -> None:
    assert set(TABLE) == {(phase, event) for phase in Phase for event in Event}


@pytest.mark.parametrize("event", Event)
def test_ended_is_final(event: Event) -> None:
    assert TABLE[Phase.ENDED, event] == (Move.IGNORE, Phase.ENDED)


@pytest.mark.parametrize(("pair", "answer"), TABLE.items())
def test_moves_mean_what_they_say(pair: tuple[Phase, Event], answer: tuple[Move, Phase]) -> None:
    (phase, event), (move, target) = pair, answer
    match move:
        case Move.IGNORE:
            assert target is phase
        case Move.ADVANCE:
            assert list(Phase).index(target) > list(Phase).index(phase)
        case Move.REOPEN:
            assert target is Phase.GATHER
            assert event in (Event.FAULT, Event.MEMBERS)


def test_a_job_can_end_from_everywhere_and_only_through_ending() -> None:
    for phase in (Phase.GATHER, Phase.LAUNCH, Phase.RUN):
        assert TABLE[phase, Event.STOP] == TABLE[phase, Event.GIVE_UP] == (Move.ADVANCE, Phase.ENDING)
    assert [pair for pair, (move, target) in TABLE.items() if target is Phase.ENDED and move is not Move.IGNORE] == [
        (Phase.ENDING, Event.GONE)
    ]


def test_the_diagram_draws_each_move_once() -> None:
    lines = diagram().splitlines()
    assert lines[0] == "stateDiagram-v2"
    assert "    run --> gather: fault (next generation)" in lines
    assert "    gather --> launch: ready" in lines
    moves = [move for move, _ in TABLE.values() if move is not Move.IGNORE]
    assert len(lines) == len(set(lines)) == len(moves) + 3


def test_the_documentation_shows_the_diagram() -> None:
    assert ARCHITECTURE.exists(), f"{ARCHITECTURE} is missing; its state diagram is the output of scripts/diagram"
    blocks = [block.partition("```")[0].strip() for block in ARCHITECTURE.read_text().split("```mermaid\n")[1:]]
    states = [block for block in blocks if block.startswith("stateDiagram")]
    assert states, (
        "docs/architecture.md has no ```mermaid block with a state diagram; paste the output of scripts/diagram"
    )
    assert diagram() in states, "docs/architecture.md shows an old state diagram; paste the output of scripts/diagram"
