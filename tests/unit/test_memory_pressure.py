"""Memory left, sample by sample → whether it is about to run out, and who takes it; whom the kernel has killed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from mt_resilient.agent.monitor.kernel_log import KernelLog, OutOfMemory
from mt_resilient.agent.monitor.memory_monitor import SAMPLE_S, Reserves
from mt_resilient.resilience.detect.memory_pressure import Reading, over, short

GB = 10**9


def course(left: list[float], **used: list[float]) -> list[Reading]:
    """One look every two seconds, in GB."""
    return [
        Reading(
            SAMPLE_S * n, int(value * GB), {who.replace("_", " "): int(values[n] * GB) for who, values in used.items()}
        )
        for n, value in enumerate(left)
    ]


def falling(start: float, per_s: float, seconds: int, noise: float = 0.0, seed: int = 1) -> list[float]:
    rng = random.Random(seed)
    return [start - per_s * SAMPLE_S * n + rng.gauss(0, noise) for n in range(int(seconds / SAMPLE_S))]


@pytest.mark.parametrize(
    ("left", "found"),
    [
        (falling(8, 0.15, 40), True),  # gone within 15 s
        (falling(100, 0.15, 40), False),  # in ten minutes: there is time
        (falling(60, 0.15, 310), True),  # and now there is not
        (falling(8, 0.15, 40, noise=0.3), True),
        (falling(8, 0.0, 40, noise=0.5), False),
        (falling(8, 0.02, 60), False),
        ([8 - 6 * (1 - 0.8**n) for n in range(40)], False),  # a start that fills its memory, and stops
        ([4 - 3 * (n % 10) / 10 for n in range(150)], False),  # a saw-tooth
        ([0.2] * 150, False),  # little, and enough
        (falling(8, 0.15, 10), False),  # too little is known
    ],
)
def test_when_it_is_about_to_run_out(left: list[float], found: bool) -> None:
    assert (short(course(left), 0.0) is not None) == found


def test_false_alarms() -> None:
    """A day of looks at memory that comes and goes without a trend."""
    rng, left, level, alarms = random.Random(5), [], 20.0, 0
    for n in range(24 * 1800):
        level = 20 + 0.98 * (level - 20) + rng.gauss(0, 0.3)
        left.append(level - (4 * (n % 900) / 900))  # garbage that grows for half an hour
        if n % 15 == 0 and n > 200:
            alarms += short(course(left[-151:]), 0.0) is not None
    assert alarms == 0


def test_who_grows() -> None:
    left = falling(8, 0.15, 40)
    grows = [3 + 0.14 * SAMPLE_S * n for n in range(len(left))]
    found = short(course(left, rank_0=[5.0] * len(left), rank_1=grows), 0.0)
    assert found
    assert found.grows == "rank 1"
    assert found.lasts_s == pytest.approx(left[-1] / 0.15, rel=0.05)
    nobody = short(course(left, rank_0=[5.0] * len(left)), 0.0)
    assert nobody
    assert nobody.grows == ""


def test_a_shortage_is_told_once_and_over_when_memory_is_no_longer_lost() -> None:
    reserves = Reserves()
    left = [*falling(8, 0.15, 44), *[1.5] * 40]
    news = [n for n, reading in enumerate(course(left)) if reserves.judge(reading, 500.0)]
    assert len(news) == 2
    assert reserves.shortage is None
    assert over(course(left))


def test_snapshots_are_asked_for_while_it_lasts_and_not_faster_than_they_are_written() -> None:
    reserves = Reserves()
    assert not reserves.snapshot_due(1.0, 100.0)
    for reading in course(falling(8, 0.15, 40)):
        reserves.judge(reading, 500.0)
    assert [t for t in range(100, 200, 10) if reserves.snapshot_due(1.0, t)] == [100, 130, 160, 190]
    assert [t for t in range(200, 500, 10) if reserves.snapshot_due(30.0, t)] == [220, 340, 460]


# -- the kernel's word ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "found"),
    [
        ("proc/vmstat", OutOfMemory.PERHAPS),  # of any process of the machine
        ("sys/fs/cgroup/memory.events", OutOfMemory.NO),  # of a group above, with other jobs in it
        ("sys/fs/cgroup/job/memory.events", OutOfMemory.CERTAIN),
        ("sys/fs/cgroup/memory/job/memory.oom_control", OutOfMemory.CERTAIN),
    ],
)
def test_a_kill_for_want_of_memory_is_counted(where: str, found: OutOfMemory, tmp_path: Path) -> None:
    group = "0::/job" if "memory.events" in where else "4:memory:/job"
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(group + "\n")
    file = tmp_path / where
    file.parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "sys/fs/cgroup/job").mkdir(parents=True, exist_ok=True)
    file.write_text("low 0\noom_kill 2\n")
    log = KernelLog(tmp_path)
    assert not log.readable
    assert log.out_of_memory(7) is OutOfMemory.NO
    file.write_text("low 0\noom_kill 3\n")
    for now_s in (100.0, 101.0, 109.9):  # a big process takes long to end
        log.hear([], now_s)
        assert log.out_of_memory(7) is found
    log.hear([], 120.0)
    assert log.out_of_memory(7) is OutOfMemory.NO, "that kill was long ago"


def test_the_log_names_whom_it_has_killed(tmp_path: Path) -> None:
    log = KernelLog(tmp_path)
    log.hear(["oom-kill: task=python", "Out of memory: Killed process 4711 (python)"], 100.0)
    log.hear([], 101.0)
    assert (log.out_of_memory(4711), log.out_of_memory(7)) == (OutOfMemory.CERTAIN, OutOfMemory.PERHAPS)
