"""Sources of state that are the script's own."""

import pytest

from mt_resilient.training.state import source_of


def test_values_that_cannot_be_kept_are_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    source = source_of("seen", {"best": 1.5, "names": {"a"}})
    assert source.collect() == {"best": 1.5}
    assert "Session(seen=…): names (set) can't be kept" in capsys.readouterr().err
    source.collect()
    assert capsys.readouterr().err == ""
