"""Real Megatron loops that end otherwise than by their last step, or do something after it."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from .loops import MEGATRON_DP2, Loop, behind, read_record, undisturbed

pytestmark = [pytest.mark.megatron, pytest.mark.slow]

VALIDATES = ("--split", "90,10,0", "--eval-iters", "2", "--eval-interval", "5")


@pytest.fixture(scope="module")
def loop() -> Loop:
    if reason := MEGATRON_DP2.missing():
        pytest.skip(reason)
    return MEGATRON_DP2


def validations(output: str) -> dict[str, str]:
    """Place → its last result; the tail of a line is the same text."""
    return dict(re.findall(r"validation loss at (.*?) \| (lm loss value: \S+)", output))


@pytest.mark.variant
def test_validation_sees_the_same_samples(loop: Loop, tmp_path: Path) -> None:
    expected, output = undisturbed(loop, *VALIDATES)
    job = behind(
        loop, tmp_path / "disturbed", "--durable-every", "1000", arguments=VALIDATES, nemesis="nan-grad@4:1,kill@9:0"
    )
    assert job.finish(280) == 0, job.said()[-4000:]
    assert read_record(tmp_path / "disturbed") == expected
    assert len(validations(output)) >= 3
    assert validations(job.printed()) == validations(output)


@pytest.mark.variant
def test_a_rank_that_is_killed_in_the_last_validation_repeats_it_with_the_same_samples(
    loop: Loop, tmp_path: Path
) -> None:
    long = ("--split", "90,10,0", "--eval-iters", "100", "--eval-interval", "6")
    _, output = undisturbed(loop, *long)
    job = behind(loop, tmp_path / "disturbed", "--durable-every", "1000", arguments=long)
    job.until_said("step 12 is on disk")
    job.kill_rank(0)
    assert job.finish(280) == 0, job.said()[-4000:]
    assert "2 ranks start from step 12" in job.said()
    assert len(validations(output)) >= 3
    assert validations(job.printed()) == validations(output)


@pytest.mark.variant
@pytest.mark.parametrize("how", [pytest.param("interval", marks=pytest.mark.variant), "signal"])
def test_what_leaves_early_goes_on_with_the_same_command(how: str, loop: Loop, tmp_path: Path) -> None:
    arguments = ("--exit-interval", "7") if how == "interval" else ("--exit-signal-handler",)
    expected, _ = undisturbed(loop)
    job = behind(
        loop,
        tmp_path / "early",
        "--durable-every",
        "1000",
        arguments=arguments,
        nemesis="term@7:0" if how == "signal" else "",
    )
    assert job.finish(120) == 0, job.said()[-4000:]
    assert "the script ended its loop normally, before the end of the training" in job.said().splitlines()[-1]
    job.start()
    assert job.finish(120) == 0, job.said()[-4000:]
    assert "the training is over" in job.said().splitlines()[-1]
    assert read_record(tmp_path / "early") == expected
    job.start()
    assert job.finish() == 2


ASYNC = ("--async-save", "--use-persistent-ckpt-worker", "--async-strategy", "mcore", "--save-interval", "3", "--save")


@pytest.mark.variant
@pytest.mark.parametrize("warm", [(), ("--no-warm",)])
def test_no_process_of_asynchronous_saves_outlives_an_agent_that_is_killed(
    warm: tuple[str, ...], loop: Loop, tmp_path: Path
) -> None:
    """Megatron's writers and Python's resource trackers are no children of the launcher's, and hold the output."""
    place = tmp_path / "killed"
    job = behind(loop, place, *warm, arguments=(*ASYNC, str(tmp_path / "saved")), nemesis="kill@5:1,hang@8:0")
    job.until(lambda now: now.min_step >= 7, 240)
    below = psutil.Process(job.agent.pid).children(recursive=True)
    commands = []
    for each in below:
        with suppress(psutil.NoSuchProcess):
            commands.append(" ".join(each.cmdline()))
    assert sum("resource_tracker" in words for words in commands) >= loop.ranks, commands
    assert len([words for words in commands if "multiprocessing" in words]) >= 2 * loop.ranks, commands
    job.agent.kill()
    job.agent.wait()
    end = time.monotonic() + 30
    while left := [*filter(psutil.Process.is_running, below), *_with(str(place))]:
        assert time.monotonic() < end, [(each.pid, each.status(), each.cmdline()) for each in left]
        time.sleep(0.1)


def _with(text: str) -> list[psutil.Process]:
    """Processes with this text in their environment."""
    found = []
    for each in psutil.process_iter():
        with suppress(psutil.Error):
            if each.environ().get("NEMESIS_DIR") == text:
                found.append(each)
    return found
