"""A Session that holds values of every kind: whatever befalls its job, it ends with the bits of the undisturbed run."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..harness import some_of
from .ordeals import EQUAL, Fault, Script, endure, expected

pytestmark = pytest.mark.xdist_group("values")

HOLDS = Script(name="holds", folder=Path(__file__).parent)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return expected(HOLDS, tmp_path_factory.mktemp("holds"))


@pytest.mark.parametrize("fault", some_of([Fault.NAN, Fault.KILL, Fault.AGENT]))
def test_values_of_every_kind(fault: Fault, tmp_path: Path, undisturbed: str) -> None:
    job, came = endure(HOLDS, [fault], tmp_path, undisturbed)
    assert came == EQUAL, job.said()[-3000:]
    assert job.faults()
