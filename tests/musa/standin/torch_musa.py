"""A MUSA device without hardware: torch's device type `musa` (PrivateUse1), whose tensors keep their data in CPU tensors.

    import torch_musa        # as with the real one, `torch.musa` and the backend `mccl` are there afterwards

Factories, `.to("musa")`, autograd, nn, optimizers and collectives (carried by gloo) work; each rank sees one device. An operation on a
musa tensor unwraps it, computes on the CPU, and wraps what comes out. Computing is synchronous, random numbers come from the CPU's
generator, and there is no C++ DistributedDataParallel.

`torch.musa._sleep(cycles)` is a kernel of a nanosecond a cycle: what is put on the default stream after it comes after it, and whoever
needs a number from the device, or synchronizes, spins until then. (Computing itself does not wait: its result is the same.)

Copies to the host with `non_blocking` on a stream of one's own are not synchronous: they run COPY_DELAY_S later, one after the other, and
read the source as it is then. So whoever writes into it too early, or reads the copy too early, gets the wrong bytes, as on hardware.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import queue
import sys
import threading
import time
import types
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

aten = torch.ops.aten
_ACROSS = {
    aten._to_copy.default,
    aten.copy_.default,
    aten._copy_from.default,
    aten.index.Tensor,
    aten.index_put_.default,
    aten._index_put_impl_.default,
}
"""What may have tensors of both kinds among its arguments; for the rest that is an error, as it is on hardware."""

COPY_DELAY_S = float(os.environ.get("MUSA_STANDIN_COPY_DELAY_S", "0.0005"))


MEMORY = (0, 0)
"""Bytes of free and of all memory."""


class Event:
    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self._reached = threading.Event()
        self._reached.set()
        self._at_s = 0.0

    def record(self, stream: Stream | None = None) -> None:
        self._reached = reached = threading.Event()

        def reach() -> None:
            self._at_s = time.monotonic()
            reached.set()

        (stream or current_stream()).put(reach)

    def elapsed_time(self, later: Event) -> float:
        return 1000 * (later._at_s - self._at_s)

    def synchronize(self) -> None:
        self._reached.wait()

    def query(self) -> bool:
        return self._reached.is_set()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)


_streams_by_handle: dict[int, Stream] = {}


class Stream:
    """What is put on it runs on a thread, in order."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self._work: queue.Queue[Callable[[], Any]] = queue.Queue()
        self.musa_stream = id(self)
        _streams_by_handle[self.musa_stream] = self
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            work = self._work.get()
            work()
            self._work.task_done()

    def put(self, work: Callable[[], Any]) -> None:
        self._work.put(work)

    def wait_event(self, event: Event) -> None:
        self.put(event._reached.wait)

    def synchronize(self) -> None:
        self._work.join()

    def __enter__(self) -> None:
        self._before, _streams.current = current_stream(), self

    def __exit__(self, *_: Any) -> None:
        _streams.current = self._before


class DefaultStream(Stream):
    """Where computing goes: at once."""

    musa_stream = 0

    def __init__(self) -> None:
        pass

    until_s = 0.0
    """When the last `_sleep` ends."""
    ends: ClassVar[deque[float]] = deque(maxlen=1024)
    """The ends of the last kernels. A queue takes no more of them."""
    later: Stream | None = None
    """Where work goes until then."""

    def put(self, work: Callable[[], Any]) -> None:
        if time.monotonic() < self.until_s or (self.later and self.later._work.unfinished_tasks):
            assert self.later
            self.later.put(lambda: (time.sleep(max(0.0, self.until_s - time.monotonic())), work()))
        else:
            work()

    def synchronize(self) -> None:
        """Spin in C, without the GIL, as cudaStreamSynchronize does."""
        while (left_s := self.until_s - time.monotonic()) > 0:
            hashlib.pbkdf2_hmac("sha256", b"spin", b"spin", min(int(left_s * 5e5) + 1, (1 << 31) - 1))


def _sleep(cycles: int) -> None:
    """Wait while the queue is full, as launching a kernel does."""
    ends = _default_stream.ends
    while len(ends) == ends.maxlen and ends[0] > time.monotonic():
        time.sleep(0.001)
    _default_stream.later = _default_stream.later or Stream()
    _default_stream.until_s = max(time.monotonic(), _default_stream.until_s) + cycles / 1e9
    ends.append(_default_stream.until_s)


_streams = threading.local()
_default_stream = DefaultStream()


def current_stream(device: Any = None) -> Stream:
    return getattr(_streams, "current", _default_stream)


def _copy_later(destination: torch.Tensor, source: torch.Tensor) -> None:
    def copy() -> None:
        time.sleep(COPY_DELAY_S)
        with torch.no_grad():
            destination.copy_(source)

    current_stream().put(copy)


class Runtime:
    """As far as `torch.musa.musart()` goes."""

    registered: ClassVar[dict[int, int]] = {}

    @classmethod
    def musaHostRegister(cls, address: int, nbytes: int, flags: int) -> int:
        cls.registered[address] = nbytes
        return 0

    @classmethod
    def musaHostUnregister(cls, address: int) -> int:
        return 0 if cls.registered.pop(address, 0) else 1

    @classmethod
    def musaMemcpy2DAsync(
        cls, to: int, to_pitch: int, source: int, pitch: int, width: int, rows: int, kind: int, stream: int
    ) -> int:
        """To the host late, as `_copy_later`; to the device at once, as computing is. Refused where the rows on the host are not in one
        piece of registered memory."""
        if width > min(to_pitch, pitch) or kind not in (1, 2):
            return 1
        host, step = (source, pitch) if kind == 1 else (to, to_pitch)
        if not any(at <= host and host + (rows - 1) * step + width <= at + size for at, size in cls.registered.items()):
            return 1

        def copy() -> None:
            time.sleep(COPY_DELAY_S if kind == 2 else 0)
            for row in range(rows):
                ctypes.memmove(to + row * to_pitch, source + row * pitch, width)

        on = _streams_by_handle.get(stream, _default_stream)
        on.put(copy)
        if kind == 1:
            on.synchronize()
        return 0

    @staticmethod
    def musaThreadExchangeStreamCaptureMode(mode: Any) -> int:
        return 0

    @staticmethod
    def musaStreamIsCapturing(stream: int, status: Any) -> int:
        return 0

    @staticmethod
    def muDevicePrimaryCtxGetState(device: int, flags: Any, active: Any) -> int:
        active._obj.value = int(_used_in == os.getpid())
        return 0


_used_in = 0
"""Process in which the device was first used: as on hardware, a child of that one may not use it."""


class MusaTensor(torch.Tensor):
    """A tensor on the device; `raw` is the CPU tensor behind it."""

    raw: torch.Tensor
    index: ClassVar[int] = 0
    """Of the device on which new tensors are."""

    @staticmethod
    def __new__(cls, raw: torch.Tensor, requires_grad: bool = False) -> MusaTensor:
        _use()
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            layout=raw.layout,
            device=torch.device("musa", cls.index),
            requires_grad=requires_grad,
        )
        made.raw = raw
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    __torch_function__ = torch._C._disabled_torch_function_impl

    def data_ptr(self) -> int:
        return self.raw.data_ptr()


_queued_calls: list[Callable[[], Any]] = []
"""What is called when the device is first used."""


def _lazy_call(call: Callable[[], Any]) -> None:
    if _used_in == os.getpid():
        call()
    else:
        _queued_calls.append(call)


def _use() -> None:
    global _used_in
    first, _used_in = not _used_in, _used_in or os.getpid()
    if _used_in != os.getpid():
        raise RuntimeError("Cannot re-initialize MUSA in forked subprocess")
    if first:
        for call in _queued_calls:
            call()


def _on_musa(device: Any) -> bool:
    return device is not None and torch.device(device).type == "musa"


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """`func` on the CPU tensors behind `args`, its results on the device where its operands or its `device` were."""
    behind: dict[int, MusaTensor] = {}

    def unwrap(value: Any) -> Any:
        if isinstance(value, MusaTensor):
            behind[id(value.raw)] = value
            return value.raw
        return torch.device("cpu") if isinstance(value, torch.device) and value.type == "musa" else value

    if func in (aten._local_scalar_dense.default, aten._to_copy.default) and any(
        isinstance(arg, MusaTensor) for arg in args
    ):
        _default_stream.synchronize()
    wanted = kwargs.get("device")
    raw_args, raw_kwargs = tree_map(unwrap, args), tree_map(unwrap, kwargs)
    if func is aten.copy_.default and not isinstance(args[0], MusaTensor) and (raw_args[2:3] or (False,))[0]:
        _copy_later(raw_args[0], raw_args[1])
        return args[0]
    raw_kwargs.pop("non_blocking", None)
    if func not in _ACROSS and behind:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if any(not isinstance(tensor, MusaTensor) and tensor.dim() > 0 for tensor in tensors):
            raise RuntimeError(f"Expected all tensors to be on the same device, but found cpu and musa in {func}")
    result = func(*raw_args, **raw_kwargs)
    if func is aten.copy_.default:
        return args[0]
    if not (_on_musa(wanted) or (behind and wanted is None)):
        return result.clone() if func is aten._to_copy.default and id(result) in behind else result

    def wrap(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, MusaTensor):
            return value
        if id(value) in behind:  # in place
            return behind[id(value)]
        return MusaTensor(value.clone() if any(value is arg for arg in raw_args) else value)

    return tree_map(wrap, result)


def _built_on_the_host(original: Callable[..., Any]) -> Callable[..., Any]:
    """torch's C++ constructors do not come to Python: build on the CPU, then move."""

    def build(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if not _on_musa(device):
            return original(data, *args, device=device, **kwargs)
        return original(data, *args, device="cpu", **kwargs).to(device)

    return build


class Mccl(dist.ProcessGroup):
    """The backend `mccl`: gloo on the CPU tensors behind."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:
        return "mccl"


def _carried(name: str) -> Callable[..., Any]:
    def collective(self: Mccl, *args: Any, **kwargs: Any) -> Any:
        raw = tree_map(lambda value: value.raw if isinstance(value, MusaTensor) else value, (args, kwargs))
        return getattr(self.gloo, name)(*raw[0], **raw[1])

    return collective


for _name in (
    "allreduce",
    "broadcast",
    "allgather",
    "_allgather_base",
    "_reduce_scatter_base",
    "barrier",
    "send",
    "recv",
):
    setattr(Mccl, _name, _carried(_name))


def _module() -> types.ModuleType:
    musa = types.ModuleType("torch.musa")
    vars(musa).update(
        is_available=lambda: True,
        is_initialized=lambda: _used_in == os.getpid(),
        _is_in_bad_fork=lambda: _used_in not in (0, os.getpid()),
        _lazy_init=lambda: None,
        _lazy_call=_lazy_call,
        device_count=lambda: 1,
        get_device_name=lambda device=None: "stand-in",
        current_device=lambda: 0,
        mem_get_info=lambda device=None: MEMORY,
        set_device=lambda device: None,
        synchronize=lambda device=None: (_use(), _default_stream.synchronize()),
        _sleep=_sleep,
        Stream=Stream,
        Event=Event,
        current_stream=current_stream,
        stream=lambda stream: stream,
        musart=lambda: Runtime,
        get_rng_state=lambda device=None: torch.get_rng_state(),
        set_rng_state=lambda state, device=None: torch.set_rng_state(state),
        manual_seed=torch.default_generator.manual_seed,
        manual_seed_all=torch.default_generator.manual_seed,
    )
    return musa


_setup_privateuseone_for_python_backend("musa", backend_module=_module())
sys.modules["torch.musa"] = torch.musa
_fallback = torch.library.Library("_", "IMPL")
_fallback.fallback(lambda operation, *args, **kwargs: _run(operation, args, kwargs), "PrivateUse1")
for _name in ("tensor", "as_tensor"):
    setattr(torch, _name, _built_on_the_host(getattr(torch, _name)))
dist.Backend.register_backend("mccl", lambda *group: Mccl(*group), devices=["musa", "cpu"])
