"""The marks by which a device shows that it advances, on the stand-in. Each test runs in a process of its own."""

from __future__ import annotations

from .test_offload import run

PROBE = """
from mt_resilient.resilience.ipc.shared_memory import mapped, memory
from mt_resilient.training.boundary.device_probe import DeviceProbe

page = Page(mapped(memory("board", PAGE_BYTES), PAGE_BYTES))
probe = DeviceProbe(torch.device("musa", 0), page)

def marks():
    time.sleep(0.1)
    probe.follow()
    return page.device_queued - page.device_reached, bool(page.device_since_ns), page.device_called == page.device_answered

def reached():
    return any(marks() == (0, False, True) for _ in range(300))

"""


def test_a_device_writes_on_the_page_which_marks_it_has_reached() -> None:
    run(
        PROBE
        + """
assert probe.begin()
assert marks() == (0, False, True)
probe.put()
assert page.device_queued == 1 and reached(), "an idle device reaches a mark"
torch.musa._sleep(15 * 10**9)
for _ in range(100):
    probe.put()  # without waiting for the device: it has not come to them below
since_ns = page.device_since_ns
assert any(marks() == (64, True, True) for _ in range(40)), "it works on another stream, and so many marks may wait at the most"
assert page.device_since_ns == since_ns, "the oldest mark counts"
torch.ones(1, device="musa").item()
assert reached()
for _ in range(300):
    probe.put()
assert reached(), "the numbers begin anew"
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
assert (page.device_queued, page.device_called) == (0, 0)
"""
    )


def test_a_device_whose_mark_came_into_a_graph_is_followed_no_longer() -> None:
    """Each replay would put the old number on the page."""
    run(
        PROBE
        + """
answers = iter([0, 1])
torch_musa.Runtime.musaStreamIsCapturing = lambda stream, status: next(answers)
assert probe.begin()
try:
    probe.put()
except RuntimeError as error:
    assert "part of a graph" in str(error)
else:
    raise AssertionError
"""
    )


def test_what_the_device_writes_may_be_anything() -> None:
    run(
        PROBE
        + """
assert probe.begin()
torch.musa._sleep(5 * 10**9)
for _ in range(3):
    probe.put()
for odd in (0, 77, -5, 1 << 40):
    page.device_reached = odd
    probe.follow()
    assert page.device_since_ns and len(probe._since_ns) == 3
page.device_reached = 2
probe.follow()
assert [*probe._since_ns] == [3]
"""
    )


def test_the_numbers_are_there_before_a_mark_reads_them_whatever_the_loop_waits_for() -> None:
    """They are made on the probe's own stream, which then is empty, and not behind the loop's work."""
    run(
        PROBE
        + """
waited = []
synchronize = torch_musa.Stream.synchronize
torch_musa.Stream.synchronize = lambda self: (waited.append(self), synchronize(self))
made, arange = [], torch.arange
torch.arange = lambda *a, **k: (made.append(torch.musa.current_stream()), arange(*a, **k))[1]
assert probe.begin()
assert made == waited == [probe._own]
"""
    )


def test_in_a_single_queue_a_stream_of_our_own_shows_nothing() -> None:
    """With `CUDA_DEVICE_MAX_CONNECTIONS=1`, as Megatron wants it, our mark may wait behind the script's work."""
    run(
        'import os\nos.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"\n'
        + PROBE
        + """
assert probe.begin()
probe.put()
assert (page.device_queued, page.device_called) == (1, 0)
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
