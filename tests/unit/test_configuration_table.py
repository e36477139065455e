"""docs/configuration.md shows each key of the configuration, its default and what it does."""

import sys
from dataclasses import dataclass
from pathlib import Path

from mt_resilient.agent.policies import SECTIONS
from mt_resilient.simulator.scenario.costs import Costs

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from document_tables import field_docstrings, tables

ALL: dict[str, type] = {**SECTIONS, "costs": Costs}
DOCUMENT = Path(__file__).parents[2] / "docs" / "configuration.md"


@dataclass(frozen=True, kw_only=True)
class Base:
    """Brakes."""

    grip: float = 0.5
    """How hard.

    Harder than that, and the wheel locks."""
    front: bool = True
    """Whether the front wheel
    has one."""


@dataclass(frozen=True, kw_only=True)
class Brakes(Base):
    """All brakes."""

    maker: str = ""
    """Empty: not known."""


def test_a_row_has_the_key_its_default_and_the_first_paragraph_of_its_docstring() -> None:
    assert tables({"brakes": Brakes}).splitlines() == [
        "## `[brakes]`",
        "",
        "All brakes.",
        "",
        "| key | default | what |",
        "|---|---|---|",
        "| `brakes.grip` | 0.5 | How hard. |",
        "| `brakes.front` | true | Whether the front wheel has one. |",
        "| `brakes.maker` | empty | Empty: not known. |",
    ]


def test_each_field_of_each_policy_has_a_docstring() -> None:
    for policy in ALL.values():
        fields = policy.__dataclass_fields__
        assert set(fields) == set(field_docstrings(policy)), policy
        assert policy.__doc__
        assert not policy.__doc__.startswith(f"{policy.__name__}("), f"{policy} has the docstring that dataclasses make"


def test_no_docstring_breaks_its_table() -> None:
    for policy in ALL.values():
        assert not any("|" in text for text in field_docstrings(policy).values())


def test_the_tables_in_the_documents_are_the_present_ones() -> None:
    assert DOCUMENT.read_text().endswith(f"\n{tables(ALL)}\n"), "scripts/configuration prints them"
