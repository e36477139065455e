"""Orders to a real, unmodified Megatron loop: what Megatron has built for its first step is built anew where it was sent to."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..harness import cli
from .loops import MEGATRON_DP2, behind, read_record

pytestmark = [pytest.mark.megatron, pytest.mark.slow]


@pytest.mark.variant
def test_paused_before_its_first_step_and_sent_behind_its_first_data(tmp_path: Path) -> None:
    if (reason := MEGATRON_DP2.missing()) is not None:
        pytest.skip(reason)
    hit = behind(MEGATRON_DP2, tmp_path / "hit")
    hit.until(lambda now: now.generation == 1)
    directory = ["--run-dir", str(hit.directory)]
    assert cli("pause", *directory).returncode == 0
    assert hit.until(lambda now: now.paused).min_step == -1
    assert cli("rewind", "--to", "0", *directory).returncode == 0
    # Whether a loop can leave data out is known once it has done a step of its own, or from its hook: Megatron's is.
    sent = cli("rewind", "--to", "0", "--skip", "2", *directory)
    assert (sent.returncode, sent.stdout) == (0, "all ranks have restored step 0, and skip batches 0 to 1\n"), sent
    assert cli("resume", *directory).returncode == 0
    assert hit.finish(280) == 0, hit.said()[-4000:]
    clean = behind(MEGATRON_DP2, tmp_path / "clean", "--skip-data", "0:2")
    assert clean.finish(280) == 0, clean.said()[-4000:]
    assert [(i.cause, i.rung, i.remedy) for i in hit.faults()] == [("ordered", 1, "replay"), ("ordered", 1, "skip")]
    assert read_record(tmp_path / "hit") == read_record(tmp_path / "clean")
