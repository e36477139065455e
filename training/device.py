"""One interface to musa, cuda and cpu. This module takes devices from tensors and never asks `torch.cuda`, because Moore Threads' patches
map `torch.cuda` to musa. With these patches, `is_available` and `current_device` return misleading results."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import torch

_PORTABLE = 1
"""Flag of cudaHostRegister and musaHostRegister: pinned for every context."""
_NON_BLOCKING = 1
"""Flag of cudaStreamCreateWithFlags: the stream does not wait for the default stream."""
_TO_DEVICE, _TO_HOST = 1, 2
"""The kinds of copies of cudaMemcpy and musaMemcpy."""
_RELAXED = 2
"""The mode of cudaThreadExchangeStreamCaptureMode in which a thread and the captures of others do not disturb each other."""
_ROWS = (*(ctypes.c_void_p, ctypes.c_size_t) * 2, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
"""Types of cudaMemcpy2DAsync's arguments."""

CopyRows: TypeAlias = Callable[[int, int, int, int, int, int, bool, Any], None]
"""The arguments: the destination, and its bytes from one row to the next; the source, and its bytes from one row to the next; bytes of a
row; rows; whether the copy goes to the host; the stream."""

_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE."""
_LIBC = ctypes.CDLL(None)


def module(kind: str) -> Any:
    """Return `torch.cuda` or `torch.musa`, which provides streams, events and generators."""
    return getattr(torch, kind)


def devices(tensors: Iterable[torch.Tensor]) -> list[torch.device]:
    """Return the accelerators that contain `tensors`, sorted by name."""
    return sorted({tensor.device for tensor in tensors} - {torch.device("cpu"), torch.device("meta")}, key=str)


def synchronize(tensors: Iterable[torch.Tensor]) -> None:
    """Wait until everything queued on the devices of `tensors` is done."""
    for each in devices(tensors):
        module(each.type).synchronize(each)


def memory(runtime: Any, where: torch.device) -> tuple[int, int, int]:
    """Return the free and the total bytes of the device's memory that this process may use, and the bytes that torch's allocator holds
    unused. 0 means: not known. runtime: as `module` returns it."""

    def asked(name: str, otherwise: Any) -> Any:
        return getattr(runtime, name, lambda where: otherwise)(where)

    free, total = asked("mem_get_info", (0, 0))
    held = asked("memory_reserved", 0)
    most = int(total * asked("get_per_process_memory_fraction", 1.0))  # torch 2.8
    return min(free, max(0, most - held)), most, max(0, held - asked("memory_allocated", held))


def register(kind: str, memory: memoryview) -> bool:
    """Pin host memory, so that copies to and from it are asynchronous. Return False if the runtime refuses. Copies then still work, but
    block the calling thread."""
    return _host_call(kind, "HostRegister", memory, len(memory), _PORTABLE)


def unregister(kind: str, memory: memoryview) -> bool:
    return _host_call(kind, "HostUnregister", memory)


def populate(memory: memoryview) -> None:
    """Map all pages of the memory with one call, if the kernel supports it (5.14). Mapping them one by one takes ten times as long. Other
    threads run meanwhile."""
    _LIBC.madvise(ctypes.c_void_p(address(memory)), ctypes.c_size_t(len(memory)), _POPULATE_WRITE)


def own_stream(kind: str, where: torch.device) -> Any:
    """Return a new stream that nothing else uses. torch's `Stream` takes one of 32 streams in turn, so it may be a stream of the script, of
    NCCL, or of a capture (https://github.com/pytorch/pytorch/issues/185836). If the runtime has no such call, return torch's."""
    create = _runtime_call(kind, "StreamCreateWithFlags", (ctypes.c_void_p, ctypes.c_uint))
    runtime, handle = module(kind), ctypes.c_void_p()
    if create is not None and hasattr(runtime, "ExternalStream"):
        with runtime.device(where):
            if create(ctypes.byref(handle), _NON_BLOCKING) == 0:
                return runtime.ExternalStream(handle.value, device=where)
    return runtime.Stream(where)


def copy_rows(kind: str) -> CopyRows | None:
    """Return a function that copies many rows between a device and pinned memory with one call, without waiting. Return None if the runtime
    has no such call. The function raises RuntimeError if the runtime refuses."""
    function = _runtime_call(kind, "Memcpy2DAsync", _ROWS)
    if function is None:
        return None

    def copy(
        to: int, to_pitch: int, source: int, pitch: int, width: int, rows: int, to_host: bool, stream: Any
    ) -> None:
        handle, direction = getattr(stream, f"{kind}_stream"), _TO_HOST if to_host else _TO_DEVICE
        code = function(to, to_pitch, source, pitch, width, rows, direction, handle)
        if code:
            raise RuntimeError(f"{kind}Memcpy2DAsync gave the error {code} for {rows} rows of {width} bytes")

    return copy


def allow_capture(kind: str) -> bool:
    """Let other threads capture graphs while the calling thread uses the runtime. Without this permission, the calling thread's calls would
    make the captures of other threads fail. Return False if the runtime has no such call."""
    function = _runtime_call(kind, "ThreadExchangeStreamCaptureMode", (ctypes.c_void_p,))
    return function is not None and int(function(ctypes.byref(ctypes.c_int(_RELAXED)))) == 0


def captures(kind: str) -> Callable[[Any], bool] | None:
    """Return a function that tells whether a stream's work is being captured as a graph, or it is not known. Return None if the runtime has
    no such call."""
    function = _runtime_call(kind, "StreamIsCapturing", (ctypes.c_void_p, ctypes.c_void_p))
    if function is None:
        return None

    def captured(stream: Any) -> bool:
        status = ctypes.c_int()
        code = function(getattr(stream, f"{kind}_stream"), ctypes.byref(status))
        return int(code) != 0 or status.value != 0

    return captured


def contexts(kind: str) -> Callable[[], list[int]] | None:
    """Return a function that returns the numbers of the devices on which this process has a context, and that creates none. Return None if
    the driver has no such call."""
    function = _call(
        kind, f"{kind[:2]}DevicePrimaryCtxGetState", f"/lib{kind}.so", (ctypes.c_int, *[ctypes.c_void_p] * 2)
    )
    if function is None:
        return None

    def present(number: int) -> bool:
        flags, active = ctypes.c_uint(), ctypes.c_int()
        return function(number, ctypes.byref(flags), ctypes.byref(active)) == 0 and active.value == 1

    return lambda: [number for number in range(module(kind).device_count()) if present(number)]


def address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def rng_states(where: Sequence[torch.device]) -> dict[str, torch.Tensor]:
    """Return the generator state of each device, as uint8 tensors on the CPU. The names have no index, because a rank may get another
    device."""
    return {name: module(each.type).get_rng_state(each) for name, each in _named(where)}


def set_rng_states(states: Mapping[str, torch.Tensor], where: Sequence[torch.device]) -> None:
    for name, each in _named(where):
        if name in states:
            module(each.type).set_rng_state(states[name], each)


def _named(where: Sequence[torch.device]) -> list[tuple[str, torch.device]]:
    return [(f"{each.type}{number or ''}", each) for number, each in enumerate(where)]


def _host_call(kind: str, name: str, memory: memoryview, *more: int) -> bool:
    function = getattr(_runtime(kind), f"{kind}{name}", None)
    return function is not None and int(function(address(memory), *more)) == 0


def _runtime(kind: str) -> Any:
    """Return torch's binding of the runtime's library; None if there is none."""
    runtime = getattr(module(kind), f"{kind}rt", None)
    return None if runtime is None else runtime()


def _runtime_call(kind: str, name: str, types: Sequence[Any]) -> Any:
    return _call(kind, f"{kind}{name}", f"/lib{kind}rt", types)


def _call(kind: str, name: str, file: str, types: Sequence[Any]) -> Any:
    """Return a function of the runtime or the driver, whose arguments have these types. If torch does not bind it, take it from the library
    that torch has loaded, whose path contains `file`. Other threads run during its calls."""
    shown = getattr(_runtime(kind), name, None)
    if shown is not None:
        return shown
    mapped = {
        line.split()[-1] for line in Path("/proc/self/maps").read_text("utf-8", "replace").splitlines() if file in line
    }
    for library in sorted(mapped):
        with suppress(OSError, AttributeError):
            function = getattr(ctypes.CDLL(library), name)
            function.argtypes, function.restype = types, ctypes.c_int
            return function
    return None
