"""Finds in a stack, as faulthandler writes it, where a rank's main thread is and whether it waits for other ranks there.

Only the innermost frames are judged: those of torch and the standard library, and the first frame of other code. A wrapper of
`torch.distributed` further out says nothing about what the code inside it does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from ..model.signals import Place

_THREAD = re.compile(r"^(?:Current thread|Thread) (0x[0-9a-f]+).*\(most recent call first\):")
_FRAME = re.compile(r'^  File "(.{1,4096})", line (\d{1,9}|\?\?\?) in (.{1,999})$')

_BOUNDARY = re.compile(r"training/boundary/allreduce\.py$")
_TEARDOWN = re.compile(r"/torch/distributed/distributed_c10d:\w*(destroy|abort|shutdown)\w*$|/threading:_shutdown$")
_EXCHANGE = re.compile(
    r"/torch/distributed/(rendezvous|distributed_c10d):(send|recv|isend|irecv|batch_isend_irecv|\w*rendezvous\w*|\w*store\w*"
    r"|init_process_group|_new_process_group_helper|\w*_handler)$|p2p_communication:|/torch/distributed/elastic/"
    r"|/torch/distributed/pipelining/\w+:\w*(wait|p2p)"
)
_COLLECTIVE = re.compile(
    r"/torch/distributed/(distributed_c10d|c10d_logger|_functional_collectives|nn/functional|device_mesh)(/\w+)?:"
    r"|/torch/distributed/utils:(_verify|_sync)"
    r"|/torch/distributed/(\w+/)*_?fsdp/.*(collectives|param_group|runtime_utils|state_utils)\w*:"
    r"|/torch/nn/parallel/distributed:\w*(sync|broadcast|join|barrier)"
)
_DATA = re.compile(r"/torch/utils/data/dataloader:(__next__|_next_data|_get_data|_try_get_data)$")
_DEVICE = re.compile(r"/torch(_musa)?/.*:synchronize$")
_BACKWARD = re.compile(r"/torch/autograd/.*:_engine_run_backward$")
_MAY_WAIT = re.compile(r"\.(item|tolist|cpu|synchronize|nonzero|to)\(|\bfloat\(")
"""A line of code that may wait in C for the device or for a collective, so that no Python frame shows it."""
_HANDLE = re.compile(r"\.wait\(")
"""A line of code that may wait in C for a collective, a send or a receive."""
_OWN_WAIT = re.compile(r"\b(sleep|input)\(|\bos\.wait")
_LIBRARY = re.compile(
    r"/torch(_musa)?/|/lib/python3[^/]*/(?!(site|dist)-packages/)|^<"
    r"|mt_resilient/training/data/\w+\.py$"
    r"|(training/(boundary/(allreduce|consensus|boundary)|session|loops/base)|resilience/ipc/board_layout)\.py$"
)
_MEASURED = re.compile(r"training/boundary/step_timer\.py$")
"""Our wrappers that only measure how long the wrapped call takes. `parse` skips their frames."""
_INSTALLED = re.compile(r"/(site|dist)-packages/")


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{'/'.join(self.file.rsplit('/', 2)[-2:])} line {self.line} in {self.function}"

    @property
    def key(self) -> str:
        return f"{self.file.removesuffix('.py')}:{self.function}"


@dataclass(frozen=True, kw_only=True)
class Spot:
    """Where a rank's main thread is."""

    place: Place
    words: str
    site: str = ""


def parse(text: str) -> Mapping[int, tuple[Frame, ...]]:
    """Return each thread's frames, the innermost first, as `faulthandler` lists them. Lines that are cut off, or are not part of a stack,
    are skipped."""
    found: dict[int, list[Frame]] = {}
    frames: list[Frame] = []
    for line in text.splitlines():
        if thread := _THREAD.match(line):
            frames = found.setdefault(int(thread[1], 16), [])
        elif (frame := _FRAME.match(line)) and not _MEASURED.search(frame[1]):
            frames.append(Frame(frame[1], int(frame[2]) if frame[2].isdigit() else 0, frame[3]))
    return {thread: tuple(frames) for thread, frames in found.items()}


def locate(frames: Sequence[Frame], code: str = "", *, queued: bool = True) -> Spot:
    """Return where a thread is. frames: innermost first; code: the source line of the innermost frame, if it can be read; queued: False if
    it is known that neither a device nor a collective has work left for which that line could wait."""
    if not frames:
        return Spot(place=Place.PERHAPS, words="in no Python code")
    inner = list(takewhile(lambda frame: _LIBRARY.search(frame.file), frames))
    outer = frames[len(inner) :]
    edge = [*inner, *outer[:1]]  # Megatron's own send and receive is one frame outside of torch
    site = next((f for f in frames if not _LIBRARY.search(f.file) and not _INSTALLED.search(f.file)), None)
    site = site or (outer or frames)[0]
    for place, what, pattern in _PLACES:
        matching = [frame for frame in edge if pattern.search(frame.file if place is Place.BOUNDARY else frame.key)]
        if not matching:
            continue
        names = [frame.function for frame in matching if frame.function not in ("wrapper", "inner", "_fn")]
        words = what or f"in {(names or [matching[-1].function])[-1]}"
        return Spot(place=place, words=words if place is Place.BOUNDARY else f"{words}, {site}", site=str(site))
    innermost = "" if site is frames[0] else f"in {frames[0].function}, "
    may_wait = _HANDLE.search(code) or (queued and _MAY_WAIT.search(code))
    place = Place.PERHAPS if may_wait and not _OWN_WAIT.search(code) else Place.ELSEWHERE
    return Spot(place=place, words=f"{innermost}at {site}", site=str(site))


_PLACES = (
    (Place.BOUNDARY, "at the boundary of its step", _BOUNDARY),
    (Place.TEARDOWN, "", _TEARDOWN),
    (Place.EXCHANGE, "", _EXCHANGE),
    (Place.COLLECTIVE, "", _COLLECTIVE),
    (Place.DATA, "in its data loader", _DATA),
    (Place.PERHAPS, "in its backward pass", _BACKWARD),
    (Place.PERHAPS, "for its device", _DEVICE),
)
"""The place is that of the first pattern that matches a frame."""
