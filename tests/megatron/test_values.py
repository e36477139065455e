"""Losses that go up, in a real Megatron loop at default policies."""

from __future__ import annotations

from pathlib import Path

import pytest

from .loops import MEGATRON_DP2, behind, read_record, undisturbed

pytestmark = [pytest.mark.megatron, pytest.mark.slow, pytest.mark.variant]

LONG = ("--train-iters", "320", "--lr-decay-iters", "320")


def test_a_hard_stretch_of_data_changes_nothing(tmp_path: Path) -> None:
    """20 batches have other labels. The spike is told, and every figure is that of plain torchrun."""
    if (reason := MEGATRON_DP2.missing()) is not None:
        pytest.skip(reason)
    hard = {"NEMESIS_HARD": "1600:1760:0.5"}
    expected, _ = undisturbed(MEGATRON_DP2, *LONG, **hard)
    job = behind(MEGATRON_DP2, tmp_path / "run", arguments=LONG, **hard)
    assert job.finish(280) == 0, job.said()[-4000:]
    assert read_record(tmp_path / "run") == expected
    assert [(incident.cause, incident.rung) for incident in job.faults()] == [("loss_spike", 0)], job.said()
    assert "no step was computed again" in job.said()


def test_a_parameter_that_was_wrongly_written_is_healed(tmp_path: Path) -> None:
    """The loss stays high. The ranks rewind to before the write, and end with the bits of the undisturbed run."""
    if (reason := MEGATRON_DP2.missing()) is not None:
        pytest.skip(reason)
    expected, _ = undisturbed(MEGATRON_DP2, *LONG)
    job = behind(MEGATRON_DP2, tmp_path / "run", "--durable-every", "40", arguments=LONG, nemesis="param@210:1")
    assert job.finish(280) == 0, job.said()[-4000:]
    found = read_record(tmp_path / "run")
    assert found.digests == expected.digests
    assert found.losses == expected.losses
    print(job.said())
