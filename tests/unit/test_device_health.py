"""What devices say of themselves → complaints, each once; the driver's words in the kernel's log."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mt_resilient.agent.monitor import mthreads
from mt_resilient.agent.monitor.nvidia_smi import parse
from mt_resilient.resilience.detect.device_health import FATAL_XIDS, DeviceReading, complaints, silent, xids

WELL = DeviceReading(device="GPU 0", uncorrected=0, remap_pending=False, remap_failed=False, hot=False, braked=False)
SILENT = DeviceReading(device="GPU 0")
"""One that tells nothing."""


@pytest.mark.parametrize(
    ("first", "last", "said"),
    [
        (WELL, [WELL] * 3, ""),
        (SILENT, [SILENT] * 3, ""),
        (None, [], ""),
        (replace(WELL, uncorrected=2), [replace(WELL, uncorrected=2)], ""),  # before this job
        (WELL, [replace(WELL, uncorrected=1)], "uncorrectable"),
        (replace(WELL, remap_pending=True), [replace(WELL, remap_pending=True)], "reset the device"),
        (WELL, [replace(WELL, remap_pending=True, remap_failed=True)], "replace the device"),
        (WELL, [replace(WELL, hot=True)] * 2, ""),  # for a moment
        (WELL, [replace(WELL, hot=True)] * 3, "temperature"),
        (WELL, [replace(WELL, braked=True)] * 3, "power supply"),
        (WELL, [replace(WELL, hot=True), WELL, replace(WELL, hot=True)], ""),
        (replace(WELL, links=3), [replace(WELL, links=3)], ""),
        (replace(WELL, links=3), [replace(WELL, links=2)], "a link to another device"),
        (replace(WELL, links=3), [WELL], ""),  # not told this time
    ],
)
def test_signs_of_a_bad_part(first: DeviceReading | None, last: list[DeviceReading], said: str) -> None:
    found = complaints(first, last)
    assert [said in words for words in found] == ([True] if said else [])


@pytest.mark.parametrize(
    ("known", "answered", "lost"),
    [
        ("01", "01", ""),
        ("01", "0", "1"),
        ("01", "", ""),
        ("0", "01", ""),
        ("", "0", ""),
    ],  # none answered: the query has failed
)
def test_a_device_that_had_a_reading_and_has_none(known: str, answered: str, lost: str) -> None:
    assert silent(known, [DeviceReading(device=each) for each in answered]) == tuple(lost)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        # NVIDIA's XID Errors (docs.nvidia.com/deploy/xid-errors) shows the second form; drivers since 343 write PCI: before the place.
        ("NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus.", ("GPU at PCI 0000:3b:00", 79)),
        ("NVRM: Xid (0000:03:00): 14, Channel 00000001", None),
        ("NVRM: Xid (0000:03:00): 48, An uncorrectable double bit error", ("GPU at PCI 0000:03:00", 48)),
        ("NVRM: Xid (PCI:0000:3b:00): 31, pid=77, name=python, MMU Fault", None),  # a program's own error
        ("usb 1-1: new device", None),
    ],
)
def test_the_drivers_words(line: str, found: tuple[str, int] | None) -> None:
    assert xids([line]) == (((found[0], f"Xid {found[1]}: {FATAL_XIDS[found[1]]}"),) if found else ())


def test_what_a_device_does_not_tell_is_not_known() -> None:
    """By the words that nvidia-smi's manual names for what is not supported."""
    (reading,) = parse("0, 00000000:3B:00.0, [N/A], [N/A], [N/A], Not Active, Active\n")
    assert reading == DeviceReading(device="GPU 0 (00000000:3B:00.0)", hot=False, braked=True)
    assert parse("Unable to determine the device handle for GPU: Unknown Error\n") == ()


DRIVER = """
#include <string.h>
int mtmlLibraryInit(void **library) { *library = library; return 0; }
int mtmlLibraryCountDevice(void *library, unsigned *count) { *count = 3; return 0; }
int mtmlLibraryInitDeviceByIndex(void *library, unsigned index, void **device) 
{ *device = (void *)(index + 1L); return index == 1 ? 999 : 0; }
int mtmlDeviceGetPciInfo(void *device, char *info) { strcpy(info, device == (void *)1 ? "0000:3b:00.0" : "0000:af:00.0"); return 0; }
struct spec { unsigned version, bandWidth, linkNum, reserved[4]; };
int mtmlDeviceGetMtLinkSpec(void *device, struct spec *spec) { spec->linkNum = 3; return 0; }
int mtmlDeviceGetMtLinkState(void *device, unsigned link, unsigned *state) { *state = link; return 0; }
int mtmlDeviceInitMemory(void *device, void **memory) { *memory = device; return 0; }
int mtmlDeviceFreeMemory(void *memory) { return 0; }
int mtmlMemoryGetRetiredPagesPendingStatus(void *memory, unsigned *pending) { *pending = 1; return 0; }
int mtmlMemoryGetEccErrorCounter(void *memory, unsigned error, unsigned counter, unsigned place, unsigned long long *count)
{ *count = 7; return memory == (void *)1 && error == 1 && counter == 0 ? 0 : 4; /* MTML_ERROR_NOT_SUPPORTED */ }
"""
"""The functions of Moore Threads' libmtml that are asked, of three devices: the second is lost, the third does not count errors."""


def test_moore_threads_devices_are_asked_through_their_own_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pymtml", reason="pip install '.[test]'")
    (tmp_path / "mtml.c").write_text(DRIVER)
    built = ["cc", "-shared", "-fPIC", "-w", "-o", str(tmp_path / "libmtml.so"), str(tmp_path / "mtml.c")]
    try:
        subprocess.run(built, check=True)
    except FileNotFoundError:
        pytest.skip("there is no C compiler")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    assert mthreads.command(tmp_path) == ()  # no device
    (tmp_path / "mtgpu.0").touch()
    assert mthreads.look(mthreads.command(tmp_path)) == (
        DeviceReading(device="GPU 0 (0000:3b:00.0)", uncorrected=7, remap_pending=True, links=1),
        DeviceReading(device="GPU 2 (0000:af:00.0)", remap_pending=True, links=1),
    )
    (tmp_path / "libmtml.so").unlink()
    assert mthreads.look(mthreads.command(tmp_path)) == ()
    assert mthreads.look((sys.executable, "-c", "print('[1]')")) == ()
