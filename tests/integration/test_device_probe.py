"""The marks by which a device shows that it advances, on the stand-in. Each test runs in a process of its own."""

from __future__ import annotations

from .test_offload import run

PROBE = """
from mt_resilient.resilience.ipc.shared_memory import mapped, memory
from mt_resilient.training.boundary.device_probe import DeviceProbe

page = Page(mapped(memory("board", PAGE_BYTES), PAGE_BYTES))
probe = DeviceProbe("musa", page)

def marks():
    time.sleep(0.1)
    probe.follow()
    return page.device_queued - page.device_reached, bool(page.device_since_ns), page.device_called == page.device_answered

"""


def test_a_device_writes_on_the_page_which_marks_it_has_reached() -> None:
    run(
        PROBE
        + """
assert probe.begin()
assert marks() == (0, False, True)
probe.put()
assert (page.device_queued, marks()) == (1, (0, False, True)), "an idle device reaches a mark at once"
torch.musa._sleep(10**9)
began = time.monotonic()
for _ in range(100):
    probe.put()
assert time.monotonic() - began < 0.5, "nobody waits for the device"
since_ns = page.device_since_ns
assert marks() == (64, True, True), "it works on another stream, and so many marks may wait at the most"
assert page.device_since_ns == since_ns, "the oldest mark counts"
torch.ones(1, device="musa").item()
assert marks() == (0, False, True)
for _ in range(300):
    probe.put()
assert marks() == (0, False, True), "the numbers begin anew"
""",
        delay_s=0.0005,
    )


def test_what_is_captured_as_a_graph_gets_no_mark() -> None:
    run(
        PROBE
        + """
torch_musa.Runtime.musaStreamIsCapturing = lambda stream, status: 1
assert probe.begin()
probe.put()
assert page.device_queued == 0
"""
    )


def test_a_device_that_cannot_be_followed_is_left_alone() -> None:
    run(
        PROBE
        + """
torch_musa.Runtime.musaThreadExchangeStreamCaptureMode = lambda mode: 1
assert not probe.begin(), "a capture in the loop could fail because of the probe"
"""
    )
