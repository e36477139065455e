"""Memory that may be taken: by the machine, and by control groups of either version."""

from pathlib import Path

import pytest

from mt_resilient.checkpoint.arena.memory_limits import available_bytes, bytes_for_slot

MIB = 1 << 20


def tree(root: Path, **files: str) -> Path:
    for name, text in {"proc/meminfo": f"MemTotal: 9 kB\nMemAvailable:   {1 << 20} kB\n", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def v2(at: str, limit: str, used: int, cache: int = 0) -> dict[str, str]:
    return {
        f"{at}/memory.max": f"{limit}\n",
        f"{at}/memory.current": f"{used}\n",
        f"{at}/memory.stat": f"anon 5\ninactive_file {cache}\n",
    }


TOP, V1 = "sys/fs/cgroup", "sys/fs/cgroup/memory"


@pytest.mark.parametrize(
    ("files", "expected_mib"),
    [
        ({}, 1024),
        ({"proc/self/cgroup": "0::/\n"}, 1024),
        ({"proc/self/cgroup": "0::/\n", **v2(TOP, "max", 5)}, 1024),
        ({"proc/self/cgroup": "0::/\n", **v2(TOP, str(100 * MIB), 60 * MIB, 10 * MIB)}, 50),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                **v2(f"{TOP}/a/b", str(900 * MIB), 0),
                **v2(f"{TOP}/a", str(80 * MIB), 0),
            },
            80,
        ),
        ({"proc/self/cgroup": "0::/of/the/host\n", **v2(TOP, str(70 * MIB), 0)}, 70),
        ({"proc/self/cgroup": "0::/\n", **v2(TOP, str(10 * MIB), 30 * MIB)}, -20),
        (
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/x\n0::/x\n",
                f"{V1}/x/memory.limit_in_bytes": f"{90 * MIB}",
                f"{V1}/x/memory.usage_in_bytes": f"{50 * MIB}",
                f"{V1}/x/memory.stat": f"inactive_file 1\ntotal_inactive_file {5 * MIB}\n",
            },
            45,
        ),
    ],
)
def test_the_tightest_limit_counts(files: dict[str, str], expected_mib: int, tmp_path: Path) -> None:
    assert available_bytes(tree(tmp_path, **files)) == expected_mib * MIB


def test_this_machine_has_available_memory() -> None:
    assert 0 < available_bytes() < 1 << 50


@pytest.mark.parametrize(
    ("limit_mib", "used_mib", "growth_mib", "expected_mib"),
    [
        (1000, 100, 300, 388),  # 512 MiB stay, as in a small container
        (20000, 5000, 600, 13000),  # a tenth of the limit
        (2000000, 1990000, 10, 9488),  # a small slot, or a few pages more: 512 MiB again
        (20000, 5000, 6000, 9000),  # as much as the slot
        (1000, 600, 300, -112),
    ],
)
def test_a_slot_leaves_memory_for_what_ranks_need_later(
    limit_mib: int, used_mib: int, growth_mib: int, expected_mib: int, tmp_path: Path
) -> None:
    machine = {"proc/meminfo": f"MemTotal: {1 << 30} kB\nMemAvailable: {1 << 29} kB\n"}
    group = {"proc/self/cgroup": "0::/\n", **v2(TOP, str(limit_mib * MIB), used_mib * MIB)}
    assert bytes_for_slot(growth_mib * MIB, tree(tmp_path, **machine, **group)) == expected_mib * MIB
