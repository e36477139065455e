"""Data was left out, the spike came again, and the steps around it are computed at a lower learning rate: with which bits, even if a rank
dies in the middle of them."""

from pathlib import Path

import pytest

from mt_resilient.resilience.inprocess.fallback import careful

from ..harness import digest_of
from .test_spikes import STEPS, run

NARROW = ("--set", "ladder.skip_steps=4", "--set", "rescue.lr_scale=0.5")
BAD = {"BAD_DATA": "40:46"}


@pytest.mark.variant
def test_killed_in_the_middle_of_a_rescue(tmp_path: Path) -> None:
    job = run(tmp_path / "hit", *NARROW, HURT="dies@44", MARKER=str(tmp_path / "dead"), **BAD)
    assert job.finish(120) == 0, job.said()[-3000:]
    rewound = [i for i in job.faults() if i.remedy]
    assert [(i.remedy, i.origin) for i in rewound][-2:] == [("skip", "again"), ("rescue", "rescued")], job.said()
    assert [i.cause for i in job.faults() if not i.remedy] == ["rank_killed"]
    turns = [i.turn for i in rewound if i.turn]
    steps = [step for step in range(int(STEPS)) if careful(step, turns)]
    windows = [word for turn in turns if turn.window for word in ("--skip-data", str(turn.window))]
    clean = run(tmp_path / "clean", *windows, **BAD, CAREFUL=f"{steps[0]}:{steps[-1] + 1}")
    assert clean.finish() == 0, clean.said()[-3000:]
    assert not clean.faults()
    assert digest_of(job.printed()) == digest_of(clean.printed())


@pytest.mark.variant
def test_a_precision_that_nothing_has_is_refused(tmp_path: Path) -> None:
    job = run(tmp_path, "--set", "rescue.precision=true")
    assert job.finish() == 5
    assert "no Megatron model with config.fp8 is found here" in job.said()
