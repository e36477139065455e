"""FP8 with delayed scaling and weights in float8, as far as a stand-in for Transformer Engine goes: poisoned and killed, the same bits."""

from __future__ import annotations

import os
from pathlib import Path

from ..harness import GATED, ROOT, Job, digest_of, step_lines, undisturbed

FP8 = ROOT / "tests" / "fp8"


def test_scales_and_maxima_and_float8_weights_come_back(tmp_path: Path) -> None:
    path = os.pathsep.join(filter(None, [str(FP8 / "standin"), os.environ.get("PYTHONPATH")]))
    script = FP8 / "train.py"
    digest, lines = undisturbed(script, "60", str(tmp_path / "none"), PYTHONPATH=path)
    command = ["--nproc-per-node", "2", str(GATED), str(script), "60", str(tmp_path / "marker")]
    job = Job(tmp_path, command, PYTHONPATH=path, POISON="once")
    job.until_step(25)
    job.kill_rank(1)
    assert job.finish() == 0, job.said()
    assert digest_of(job.printed()) == digest
    assert step_lines(job.printed()) == lines
    assert [incident.rung for incident in sorted(job.faults(), key=lambda each: each.rung)] == [1, 2]
