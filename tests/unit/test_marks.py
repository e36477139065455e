"""Marks of recoveries in the script's own logs, written by the real libraries."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mt_resilient.training.attach import marks

from ..harness import environment


def test_nothing_is_imported_for_a_script_without_such_logs() -> None:
    script = (
        "import sys; from mt_resilient.training.attach import marks; before = {*sys.modules}; "
        "marks.due('The ranks started again', 5, 3); marks.leave(); assert {*sys.modules} == before"
    )
    done = subprocess.run([sys.executable, "-c", script], env=environment(), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def mark(what: str, reached: int, resumed: int) -> None:
    marks.due(what, reached, resumed)
    marks.leave()
    marks.leave()  # the next boundary leaves no second one


def logged(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return found


def test_tensorboard_s_open_writers_get_a_mark_at_the_step_that_was_reached(tmp_path: Path) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard", reason="tensorboard is not installed")

    class Own(tensorboard.SummaryWriter):
        pass

    writers = [kind(str(tmp_path / kind.__name__)) for kind in (tensorboard.SummaryWriter, Own)]
    closed = tensorboard.SummaryWriter(str(tmp_path / "closed"))
    closed.close()
    for writer in writers:
        writer.add_scalar("loss", 2.0, 510)
    mark("The ranks rewound in place", 512, 480)
    for writer in writers:
        writer.close()
        found = logged(Path(writer.log_dir))
        assert [(each.step, each.value) for each in found.Scalars("mt_resilient/steps_again")] == [(512, 32.0)]
        (text,) = found.Tensors("mt_resilient/recovery/text_summary")
        assert text.tensor_proto.string_val == [b"The ranks rewound in place: from step 512 back to step 480"]
        assert [each.step for each in found.Scalars("loss")] == [510]
    assert logged(tmp_path / "closed").Tags()["scalars"] == [], "a closed writer stays closed"


def test_a_writer_that_fails_is_told_and_harms_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard", reason="tensorboard is not installed")

    class Broken(tensorboard.SummaryWriter):
        def add_scalar(self, *words: object) -> None:
            raise OSError("the disk is full")

    writer = Broken(str(tmp_path))
    mark("The ranks started again", 5, 3)
    assert (
        "could not be marked in the script's own log (OSError: the disk is full); training continues"
        in capfd.readouterr().err
    )
    writer.close()
    del writer
    gc.collect()


def test_wandb_gets_a_figure_and_its_count_of_rows_stays(tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    with wandb.init(mode="offline", dir=str(tmp_path), project="gpt") as run:
        run.log({"loss": 2.0})
        run.log({"loss": 1.5})
        before = run.step
        mark("The ranks rewound in place", 512, 480)
        assert run.step == before
        run.log({"loss": 1.0})
        assert run.step == before + 1
        assert run.summary["mt_resilient/steps_again"] == 32
    mark("The ranks rewound in place", 512, 480)  # after its end there is no log
    wandb.teardown()
