"""What devices say of themselves → complaints, each once; the driver's words in the kernel's log."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from mt_resilient.agent.monitor import device_reader
from mt_resilient.agent.monitor.device_reader import LATE_S, DeviceReader
from mt_resilient.agent.monitor.kernel_log import KernelLog
from mt_resilient.agent.monitor.node_health import Vitals
from mt_resilient.resilience.detect.device_health import (
    FATAL_XIDS,
    LOOK_S,
    DeviceNews,
    DeviceReading,
    complaints,
    silent,
    xids,
)
from mt_resilient.resilience.detect.straggler import StragglerPolicy
from mt_resilient.resilience.store.codec import dumps

Making = Callable[[Sequence[str]], DeviceReader]
WELL = DeviceReading(device="GPU 0", uncorrected=0, remap_pending=False, remap_failed=False, hot=False, braked=False)
SILENT = DeviceReading(device="GPU 0")
"""One that tells nothing."""
LOG = "NVRM: Xid (PCI:0000:3c:00): 79, pid=1234, GPU has fallen off the bus."
"""In the kernel's log."""


@pytest.mark.parametrize(
    ("first", "last", "said"),
    [
        (WELL, [WELL] * 3, ""),
        (SILENT, [SILENT] * 3, ""),
        (SILENT, [replace(WELL, uncorrected=2)], ""),  # not told before
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
        (replace(WELL, repaired=4), [replace(WELL, repaired=4)], ""),
        (replace(WELL, repaired=4), [replace(WELL, repaired=5)], "a link to another device has errors"),
        (replace(WELL, repaired=4), [WELL], ""),
        (WELL, [replace(WELL, crc_errors=0), replace(WELL, crc_errors=2999, at_s=30.0)], ""),
        (
            WELL,
            [replace(WELL, crc_errors=0), replace(WELL, crc_errors=3000, at_s=30.0)],
            "a link to another device has errors",
        ),
        (WELL, [replace(WELL, crc_errors=3000, at_s=30.0)], ""),  # from before this job
    ],
)
def test_signs_of_a_bad_part(first: DeviceReading, last: list[DeviceReading], said: str) -> None:
    found = complaints(first, last)
    assert [said in words for words in found] == ([True] if said else [])


@pytest.mark.parametrize(
    ("known", "answered", "lost"),
    [
        ("01", "01", ""),
        ("01", "0", "1"),
        ("0", "", "0"),
        ("0", "01", ""),
        ("", "0", ""),
    ],
)
def test_a_device_that_had_a_reading_and_has_none(known: str, answered: str, lost: str) -> None:
    assert silent(known, [DeviceReading(device=each) for each in answered]) == tuple(lost)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        # NVIDIA's XID Errors (docs.nvidia.com/deploy/xid-errors) shows the second form; drivers since 343 write PCI: before the place.
        ("NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus.", ("GPU at PCI 0000:3b:00.0", 79)),
        ("NVRM: Xid (0000:03:00): 14, Channel 00000001", None),
        ("NVRM: Xid (0000:03:00): 48, An uncorrectable double bit error", ("GPU at PCI 0000:03:00.0", 48)),
        ("NVRM: Xid (PCI:0000:3b:00): 31, pid=77, name=python, MMU Fault", None),  # a program's own error
        # With MIG, NVIDIA's open kernel module also names the GPU instance and the compute instance.
        ("NVRM: Xid (PCI:0000:01:00 GPU-I:05): 94, pid=77, Contained", ("GPU at PCI 0000:01:00.0", 94)),
        ("NVRM: Xid (PCI:0000:01:00 GPU-I:05 GPU-CI:0a): 95, Uncontained", ("GPU at PCI 0000:01:00.0", 95)),
        ("usb 1-1: new device", None),
    ],
)
def test_the_drivers_words(line: str, found: tuple[str, int] | None) -> None:
    assert xids([line]) == (((found[0], f"Xid {found[1]}: {FATAL_XIDS[found[1]]}"),) if found else ())


MTML = """
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

NVML = """
#include <stdlib.h>
#include <unistd.h>
#define DEVICE(n) (void *)(n + 1L)
struct pci { char legacy[16]; unsigned domain, bus, device, id, subsystem; char address[32]; };
struct event { void *device; unsigned long long type, data; unsigned gpu, compute; };
static unsigned waits, registered, failed;
static int lost(void *device) { return device == DEVICE(1) && (waits || getenv("LOST")); }
int nvmlInitWithFlags(unsigned flags) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 4; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { *device = DEVICE(index); return index == 3 ? 15 : 0; }
int nvmlDeviceGetPciInfo_v3(void *device, struct pci *pci)
{ if (waits) return 15; pci->domain = 0; pci->bus = 0x3a + (long)device; pci->device = 0; return 0; }
int nvmlDeviceGetTotalEccErrors(void *device, unsigned error, unsigned counter, unsigned long long *count)
{ *count = 7; return lost(device) ? 15 : device == DEVICE(0) && error == 1 && counter == 0 ? 0 : 3; }
int nvmlDeviceGetRemappedRows(void *device, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed)
{ *corrected = *uncorrected = 1; *pending = 0; *failed = 1; return device == DEVICE(0) ? 0 : 3; }
int nvmlDeviceGetRetiredPagesPendingStatus(void *device, unsigned *pending) { *pending = 1; return device == DEVICE(1) ? 0 : 3; }
int nvmlDeviceGetCurrentClocksEventReasons(void *device, unsigned long long *reasons)
{ *reasons = 0x48; return device == DEVICE(0) ? 0 : 3; }
int nvmlDeviceGetNvLinkState(void *device, unsigned link, unsigned *active)
{ *active = link != 1; return device != DEVICE(0) ? 3 : link < 3 ? 0 : 2; }
int nvmlDeviceGetNvLinkErrorCounter(void *device, unsigned link, unsigned counter, unsigned long long *count)
{ *count = counter == 2 ? 100 : 1 + counter; return counter == 3 ? 3 : 0; }
int nvmlEventSetCreate(void **set) { *set = &waits; return 0; }
int nvmlDeviceRegisterEvents(void *device, unsigned long long types, void *set)
{ registered += types == 8 && set == &waits; return device == DEVICE(2) ? 3 : 0; }
int nvmlEventSetWait_v2(void *set, struct event *event, unsigned ms)
{
    static const unsigned said[] = {79, 31};
    if (registered != 3 || ms > 30001) _exit(1);
    if (waits == 2) { usleep(1000 * ms); return 10; }
    if (getenv("LOST") && !failed++) return 15;
    event->device = DEVICE(1); event->type = 8; event->data = said[waits++]; return 0;
}
"""
"""The functions of NVIDIA's libnvidia-ml that are asked, of four devices. The second has Xid 79, and then one that is a program's own
error. With LOST in the environment, it is lost at the first look. The third supports no question, and the fourth is lost from the start."""


def built(source: str, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "driver.c").write_text(source)
    command = ["cc", "-shared", "-fPIC", "-w", "-o", str(folder / name), str(folder / "driver.c")]
    try:
        subprocess.run(command, check=True)
    except FileNotFoundError:
        pytest.skip("there is no C compiler")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(folder))


@pytest.fixture
def reader_of() -> Iterator[Making]:
    made: list[DeviceReader] = []
    yield lambda words: made.append(DeviceReader(words)) or made[-1]
    for reader in made:
        if reader.pid:
            os.kill(reader.pid, signal.SIGKILL)


def heard(reader: DeviceReader, enough: Callable[[list[DeviceNews]], bool], now_s: float = 0.0) -> list[DeviceNews]:
    """Return the reader's news, until there is enough."""
    found: list[DeviceNews] = []
    until_s = time.monotonic() + 60
    while not enough(found) and time.monotonic() < until_s:
        found += reader.news(now_s)
        time.sleep(0.01)
    return found


def test_moore_threads_devices_are_asked_through_their_own_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader_of: Making
) -> None:
    pytest.importorskip("pymtml", reason="pip install '.[test]'")
    built(MTML, "libmtml.so", tmp_path, monkeypatch)
    assert device_reader.command(tmp_path) == ()  # no device
    (tmp_path / "mtgpu.0").touch()
    reader = reader_of(device_reader.command(tmp_path))
    look = DeviceNews(
        readings=(
            DeviceReading(device="GPU at PCI 0000:3b:00.0", uncorrected=7, remap_pending=True, links=1),
            DeviceReading(device="GPU at PCI 0000:af:00.0", remap_pending=True, links=1),
        )
    )
    assert heard(reader, lambda found: reader.pid is None and found != []) == [look]
    assert reader.news(LOOK_S / 2) == []
    assert reader.pid is None
    assert heard(reader, bool, LOOK_S) == [look], "the process is started again for the next look"


def test_nvidias_devices_are_asked_through_nvml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader_of: Making
) -> None:
    pytest.importorskip("pynvml", reason="pip install .")
    built(NVML, "libnvidia-ml.so.1", tmp_path, monkeypatch)
    (tmp_path / "nvidia3").touch()
    reader = reader_of(device_reader.command(tmp_path))
    look, xid = heard(reader, lambda found: len(found) == 2)
    assert look.readings is not None
    assert [replace(each, at_s=0.0) for each in look.readings] == [
        DeviceReading(
            device="GPU at PCI 0000:3b:00.0",
            uncorrected=7,
            remap_pending=False,
            remap_failed=True,
            hot=True,
            braked=False,
            links=2,
            repaired=9,
            crc_errors=300,
        ),
        DeviceReading(device="GPU at PCI 0000:3c:00.0", remap_pending=True),
        DeviceReading(device="GPU at PCI 0000:3d:00.0"),
    ]
    assert xid.complaints == xids([LOG]) != ()
    monkeypatch.setenv("LOST", "1")
    look, again = heard(reader_of(device_reader.command(tmp_path)), lambda found: len(found) == 2)
    assert [each.device for each in look.readings or ()] == ["GPU at PCI 0000:3b:00.0", "GPU at PCI 0000:3d:00.0"]
    assert again == xid, "it waits for Xids again after NVML could not"


def test_what_the_driver_and_the_kernel_say_is_one_complaint(tmp_path: Path, reader_of: Making) -> None:
    """A first look at two devices, an Xid by both ways, and a look at one device."""
    news = [
        DeviceNews(readings=(DeviceReading(device="GPU 1"), DeviceReading(device="GPU at PCI 0000:3c:00.0"))),
        DeviceNews(complaints=xids([LOG])),
        DeviceNews(readings=(DeviceReading(device="GPU 1", remap_failed=True),)),
    ]
    (tmp_path / "dev").mkdir()
    log = tmp_path / "dev/kmsg"
    log.touch()
    vitals = Vitals(StragglerPolicy(), [])
    vitals.kernel = KernelLog(tmp_path)
    lines = [dumps(each).decode() for each in news]
    vitals.devices = reader_of((sys.executable, "-c", f"print(*{lines!r}, sep=chr(10))"))
    log.write_text(f"3,9,1,-;{LOG}\n")
    until_s = time.monotonic() + 60
    while len(vitals.complaints) < 3 and time.monotonic() < until_s:
        vitals.look(None, (), {}, False, 0.0, 5.0)
        time.sleep(0.01)
    assert [(each.device, each.words) for each in vitals.complaints] == [
        ("GPU at PCI 0000:3c:00.0", "Xid 79: it has fallen off the bus"),
        ("GPU at PCI 0000:3c:00.0", "it does not answer"),
        ("GPU 1", "failing memory could not be remapped: replace the device"),
    ]


def test_a_process_that_is_silent_is_killed_and_another_one_started(reader_of: Making) -> None:
    program = "import time; print('words of a library', '[1]', '{}', sep='\\n', flush=True); time.sleep(60)"
    reader = reader_of((sys.executable, "-c", program))
    assert heard(reader, bool) == [DeviceNews()]
    first = reader.pid
    reader.news(LOOK_S + LATE_S)
    assert reader.pid == first
    heard(reader, lambda _: reader.pid not in (None, first), LOOK_S + LATE_S + 1)
    assert reader.pid not in (None, first)


def test_a_reader_that_can_never_work_is_told_once_with_its_reason(tmp_path: Path, reader_of: Making) -> None:
    said: list[tuple[str, str]] = []
    vitals = Vitals(StragglerPolicy(), said)
    vitals.kernel = KernelLog(tmp_path)
    vitals.devices = reader_of((sys.executable, "-c", "import sys; sys.exit('a traceback\\nNVML is \x1b not found')"))
    until_s, now_s, started = time.monotonic() + 60, 0.0, 0
    while started < 5 and time.monotonic() < until_s:
        before = vitals.devices.pid
        vitals.look(None, (), {}, False, now_s, 5.0)
        if before is None and vitals.devices.pid:
            started += 1
            assert len(said) == (started > 3)
        now_s += LOOK_S if vitals.devices.pid is None else 0.0
        time.sleep(0.01)
    assert said == [("the health of devices is not observed: NVML is \\x1b not found", "warn")]


@pytest.mark.parametrize("word", ["Event", "Throttle"])
def test_the_reasons_for_a_slow_device_are_known_to_old_and_new_packages(word: str, tmp_path: Path) -> None:
    """The constants are NVML's own (nvml.h)."""
    names = {
        "nvmlDeviceGetCurrentClocks{}Reasons": 1,
        "nvmlClocks{}ReasonHwThermalSlowdown": 64,
        "nvmlClocks{}ReasonHwPowerBrakeSlowdown": 128,
    }
    (tmp_path / "pynvml.py").write_text("\n".join(f"{name.format(word)} = {value}" for name, value in names.items()))
    program = "from mt_resilient.agent.monitor import nvidia; print(nvidia._SLOWED_BY, nvidia._HEAT, nvidia._POWER)"
    path = os.pathsep.join((str(tmp_path), str(Path(device_reader.__file__).parents[3])))
    ran = subprocess.run(
        (sys.executable, "-c", program), env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert ran.stdout == "1 64 128\n", ran.stderr
