"""A model whose weights no snapshot could hold (DeepSpeed ZeRO-3): a Session refuses it before the first step, and a known loop runs as
without us."""

from __future__ import annotations

import subprocess
from pathlib import Path

from mt_resilient.resilience.errors import StateError

from ..harness import Job, environment
from ..unit.test_unknown_loops import MODERN

PARTITIONED = Path(__file__).parent / "partitioned.py"
SAID = "model is partitioned by DeepSpeed ZeRO-3, and a snapshot would hold no weights. Use ZeRO-1, ZeRO-2 or FSDP2."


def test_a_session_refuses_it_before_the_first_step(tmp_path: Path) -> None:
    job = Job(tmp_path, ["--nproc-per-node", "1", str(PARTITIONED)])
    assert job.agent.wait(300) == StateError.exit_code, job.said()
    assert SAID in job.said()
    assert "trained" not in job.printed()


def test_without_mt_resilient_a_session_does_nothing(tmp_path: Path) -> None:
    command = ["torchrun", "--standalone", "--nproc-per-node", "1", str(PARTITIONED)]
    assert "trained" in subprocess.run(command, env=environment(), text=True, capture_output=True, timeout=300).stdout


def test_a_known_loop_trains_it_unwatched(tmp_path: Path) -> None:
    for name, source in (
        ("training/training", f"import megatron.core.num_microbatches_calculator\n{MODERN}"),
        ("core/num_microbatches_calculator", "get_current_global_batch_size = update_num_microbatches = lambda *_: 1"),
    ):
        path = tmp_path / f"path/megatron/{name}.py"
        path.parent.mkdir(parents=True)
        path.write_text(source)
    paths = f"{tmp_path / 'path'}:{environment().get('PYTHONPATH', '')}"
    job = Job(tmp_path, ["--nproc-per-node", "1", str(PARTITIONED), "--megatron"], PYTHONPATH=paths)
    assert job.agent.wait(300) == 0, job.said()
    assert "trained 4 steps" in job.printed()
    assert job.said().count(SAID) == 1
    assert job.said().count("runs as under torchrun alone: unwatched and without snapshots") == 1
