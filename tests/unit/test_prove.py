"""What the proof on a device says of a run."""

from __future__ import annotations

import pytest

from ..device.prove import verdict

PLAIN = ("abc", ["0x1p+0"])


@pytest.mark.parametrize(
    ("case", "code", "took_s", "found", "said"),
    [
        ("wrapped", 0, None, PLAIN, "equal"),
        ("kill", 0, 2.0, PLAIN, "equal"),
        ("kill", 0, None, PLAIN, "**the fault did not strike**"),
        ("agent", 0, None, PLAIN, "**the fault did not strike**"),
        ("kill", 3, 2.0, PLAIN, "**exit code 3**"),
        ("repeat", 0, None, ("abc", ["0x1p+1"]), "**other bits**"),
        ("hang", -15, 5.0, ("", []), "**did not end**"),
    ],
)
def test_a_run_is_equal_only_if_its_fault_struck_and_it_ended_in_order(
    case: str, code: int, took_s: float | None, found: tuple[str, list[str]], said: str
) -> None:
    assert verdict(case, code, took_s, found, PLAIN) == said
