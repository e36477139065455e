"""A real Megatron loop with `--overlap-param-gather`: at a boundary, each rank has the new values of only the elements that it steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mt_resilient.checkpoint.backend import place
from mt_resilient.checkpoint.durable import catalog
from mt_resilient.checkpoint.durable.load_resharded import Saved

from .loops import MEGATRON_OVERLAPPED, behind, read_record, undisturbed

pytestmark = [pytest.mark.megatron, pytest.mark.slow]

FLAG = "--overlap-param-gather"


def test_files_another_layout_and_a_run_without_the_flag_have_the_optimizer_s_values(tmp_path: Path) -> None:
    if reason := MEGATRON_OVERLAPPED.missing():
        pytest.skip(reason)
    expected, _ = undisturbed(MEGATRON_OVERLAPPED)
    path = tmp_path / "disturbed"
    snapshots = ("--snapshots", str(tmp_path / "snapshots"), "--durable-every", "5")
    job = behind(MEGATRON_OVERLAPPED, path, *snapshots, nemesis="hang@8:0")
    job.until_said("step 5 is on disk")
    job.agent.kill()
    job.agent.wait()
    for snapshot in catalog.committed(place.at(str(tmp_path / "snapshots"))):
        saved = Saved(snapshot)
        names = [name.removeprefix("optimizer/main/") for name in saved.boxes if name.startswith("optimizer/main/")]
        assert len(names) > 10
        for name in names:
            assert np.array_equal(saved.whole(name), saved.whole(f"optimizer/main/{name}")), name
    alone = replace(MEGATRON_OVERLAPPED, ranks=1)
    elsewhere = ("--snapshots", str(tmp_path / "elsewhere"), "--start-from", str(tmp_path / "snapshots"))
    other = behind(alone, tmp_path / "other", *elsewhere, nemesis="hang@7:0")
    other.until_said("step 5 is on disk")
    other.kill_everything()
    here, there = (Saved(catalog.committed(place.at(str(tmp_path / each)))[0]) for each in ("snapshots", "elsewhere"))
    for name in names:
        assert np.array_equal(here.whole(name), there.whole(name)), name
    job.command.remove(FLAG)
    job.command.insert(job.command.index("run") + 1, "--changed-arguments")
    job.start()
    assert job.finish(280) == 0, job.said()[-4000:]
    assert "2 ranks start from step 5" in job.said()
    assert read_record(path) == expected
