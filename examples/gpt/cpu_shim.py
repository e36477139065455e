"""torch.cuda → CPU, so that unmodified Megatron code trains on CPU tensors with gloo.

The same idea as the patch with which Moore Threads maps torch.cuda to torch.musa, in the other direction. `install()` comes after
`import torch` and before anything of Megatron; modules of Megatron that are already there are patched where they lie. It reads
nothing of the process it is installed in, so a process that was forked later may become any rank.

Each patch is a named function with its reason. `MCORE_CPU_SHIM_SKIP=name,name` leaves some out, which is how it was found that every
one of them is needed. The patches to Megatron's own modules are in `cpu_shim_megatron.py`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.abc
import importlib.util
import logging
import os
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

PATCHES: dict[str, Callable[[Any], None]] = {}
"""What `install` applies to torch, by name."""

AFTER_IMPORT: dict[str, list[Callable[[Any], None]]] = {}
"""What is to be done to a module as soon as it has been executed."""

_MEMORY_BYTES = 1 << 34


def patch(change: Callable[[Any], None]) -> Callable[[Any], None]:
    PATCHES[change.__name__] = change
    return change


def after_import(module: str) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    """Have the decorated function called with `module` right after its import (wants `watch_imports`)."""

    def register(change: Callable[[Any], None]) -> Callable[[Any], None]:
        AFTER_IMPORT.setdefault(module, []).append(change)
        return change

    return register


class _AfterImport(importlib.abc.MetaPathFinder):
    """Asks all *other* finders for the module, so that several import hooks on one module all come to work."""

    def __init__(self) -> None:
        self._looking: set[str] = set()

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> Any:
        if name not in AFTER_IMPORT or name in self._looking:
            return None
        self._looking.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._looking.discard(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _apply(name, module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _skipped() -> list[str]:
    return os.environ.get("MCORE_CPU_SHIM_SKIP", "").split(",")


def _apply(name: str, module: ModuleType) -> None:
    for change in AFTER_IMPORT[name]:
        if change.__name__ not in _skipped():
            change(module)


def watch_imports() -> None:
    """Put `after_import` to work. Imports nothing; may be called twice."""
    if not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


def install() -> None:
    """Map torch.cuda to the CPU in this process. May be called twice."""
    import torch
    import torch.distributed

    if getattr(torch.cuda, "is_cpu_shim", False):
        return
    torch.cuda.is_cpu_shim = True
    import cpu_shim_megatron  # noqa: F401  (registers its patches)

    for name, change in PATCHES.items():
        if name not in _skipped():
            change(torch)
    watch_imports()
    for name in AFTER_IMPORT.keys() & sys.modules.keys() - {"torch"}:
        _apply(name, sys.modules[name])
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron asserts it when TP > 1


def _is_cuda(device: Any) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    return getattr(device, "type", None) == "cuda" or (isinstance(device, int) and not isinstance(device, bool))


# ---------------------------------------------------------------------------------------------------------------- device


@patch
def device_queries(torch: Any) -> None:
    """Megatron passes current_device() on as `device=…`, so that has to be a CPU device.

    Each gets a function of its own: torch._dynamo, which torch.optim imports, keeps a table of them and accepts none twice.
    """
    cuda, cpu = torch.cuda, torch.device("cpu")
    cuda.is_available = lambda: True
    cuda.is_initialized = lambda: True
    cuda._lazy_init = lambda: None
    cuda._lazy_call = lambda callback, **_: callback()
    cuda.device_count = lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # read late: forked ranks get it after us
    cuda.current_device = lambda: cpu
    cuda.set_device = lambda device: None
    cuda.synchronize = lambda device=None: None
    cuda.device = lambda device=None: contextlib.nullcontext()
    cuda.get_device_capability = lambda device=None: (8, 0)
    cuda.is_current_stream_capturing = lambda: False
    cuda.get_device_properties = lambda device=None: SimpleNamespace(
        name="cpu", major=8, minor=0, total_memory=_MEMORY_BYTES, multi_processor_count=1
    )


@patch
def accelerator(torch: Any) -> None:
    """A CUDA build of torch on a machine without a driver would now believe in its accelerator."""
    if torch.backends.cuda.is_built():
        torch.accelerator.is_available = lambda: False
        torch.accelerator.current_accelerator = lambda *_, **__: None


@patch
def memory(torch: Any) -> None:
    """Megatron's first log line prints the device memory."""
    cuda = torch.cuda
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, lambda device=None: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    cuda.mem_get_info = lambda device=None: (_MEMORY_BYTES, _MEMORY_BYTES)
    cuda.memory_stats = lambda device=None: defaultdict(int)
    cuda.empty_cache = lambda: None
    cuda.reset_peak_memory_stats = lambda device=None: None


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None:
        self._at = 0.0

    def record(self, stream: Any = None) -> None:
        self._at = time.perf_counter()

    def wait(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: _Event) -> float:
        return (end._at - self._at) * 1e3


class _Stream(contextlib.nullcontext[None]):
    stream_id = cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def synchronize(self) -> None: ...

    def record_event(self, event: _Event | None = None) -> _Event:
        event = event or _Event()
        event.record()
        return event


@patch
def streams(torch: Any) -> None:
    """MoE dispatchers and optimizer offload order their work by streams; on a CPU everything already is in order."""
    cuda, default = torch.cuda, _Stream()
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.current_stream = lambda device=None: default
    cuda.default_stream = lambda device=None: default
    cuda.stream = lambda stream=None: contextlib.nullcontext()
    torch.Tensor.record_stream = lambda self, stream: None


@patch
def nvtx(torch: Any) -> None:
    """Profiler ranges surround layers and collectives."""
    from torch.cuda import nvtx

    nvtx.range_push = lambda message: None
    nvtx.range_pop = lambda: None


# ------------------------------------------------------------------------------------------------------------- randomness


@patch
def rng(torch: Any) -> None:
    """The device's generator is the CPU's: dropout draws from it. Megatron's tracker swaps whole states, so sharing is sound."""
    cuda = torch.cuda

    def get(device: Any = None) -> Any:
        return torch.get_rng_state()

    def put(state: Any, device: Any = None) -> None:
        torch.set_rng_state(state)

    def seed(value: int) -> None:  # not torch.manual_seed: that calls torch.cuda.manual_seed_all
        torch.default_generator.manual_seed(int(value))

    class Generators(tuple):  # Megatron indexes it with current_device()
        def __getitem__(self, index: Any) -> Any:
            return torch.default_generator

    for module in (cuda, cuda.random):
        module.get_rng_state, module.set_rng_state = get, put
        module.manual_seed = module.manual_seed_all = seed
    cuda.get_rng_state_all = lambda: [get()]
    cuda.set_rng_state_all = lambda states: put(states[0])
    cuda.initial_seed = torch.initial_seed
    cuda.default_generators = Generators((torch.default_generator,))
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(  # it warns of the sharing at every fork
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )


@patch
def loader_rng(torch: Any) -> None:
    """iter(DataLoader) draws a seed from the CPU generator, which is dropout's here: loaders get a generator of their own."""
    from torch.utils.data import DataLoader

    init = DataLoader.__init__

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("generator") is None:
            kwargs["generator"] = torch.Generator().manual_seed(0)
        init(self, *args, **{**kwargs, "pin_memory": False})

    DataLoader.__init__ = __init__


# ---------------------------------------------------------------------------------------------------------------- tensors


@patch
def tensor_moves(torch: Any) -> None:
    """`.cuda()`, `.to("cuda")`, `.pin_memory()` stay where they are."""
    torch.Tensor.cuda = torch.nn.Module.cuda = torch.Tensor.pin_memory = lambda self, *_, **__: self
    to = torch.Tensor.to

    @functools.wraps(to)
    def moved(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args and _is_cuda(args[0]):
            args = ("cpu", *args[1:])
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return to(self, *args, **kwargs)

    torch.Tensor.to = moved


@patch
def factories(torch: Any) -> None:
    """`torch.zeros(…, device="cuda")` and its kin."""
    plain = "tensor zeros ones empty full arange linspace rand randn randint randperm"
    likes = "as_tensor zeros_like ones_like empty_like full_like rand_like randn_like"

    def wrap(create: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(create)
        def created(*args: Any, **kwargs: Any) -> Any:
            if _is_cuda(kwargs.get("device")):
                kwargs["device"] = "cpu"
            kwargs.pop("pin_memory", None)
            return create(*args, **kwargs)

        return created

    for owner, names in ((torch, f"{plain} {likes}"), (torch.Tensor, "new_zeros new_ones new_empty new_full new_tensor")):
        for name in names.split():
            setattr(owner, name, wrap(getattr(owner, name)))


@patch
def legacy_types(torch: Any) -> None:
    """Optimizers sort parameters by `p.type() == "torch.cuda.FloatTensor"`; clipping builds torch.cuda.FloatTensor([…])."""
    for name in ("Float", "Half", "BFloat16", "Double", "Int", "Long", "Byte", "Bool"):
        setattr(torch.cuda, f"{name}Tensor", getattr(torch, f"{name}Tensor"))
    original = torch.Tensor.type

    @functools.wraps(original)
    def type_(self: Any, dtype: Any = None, **kwargs: Any) -> Any:
        if dtype is None:
            return original(self).replace("torch.", "torch.cuda.", 1)
        return original(self, dtype.replace("torch.cuda.", "torch.") if isinstance(dtype, str) else dtype, **kwargs)

    torch.Tensor.type = type_


@patch
def is_cuda(torch: Any) -> None:
    """Megatron's checkpoint writer and MoE permutation ask."""
    torch.Tensor.is_cuda = property(lambda self: True)


@patch
def autocast(torch: Any) -> None:
    """torch.autocast("cuda") wants a CUDA device."""
    init = torch.autocast.__init__

    @functools.wraps(init)
    def __init__(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        init(self, "cpu" if _is_cuda(device_type) else device_type, *args, **kwargs)

    torch.autocast.__init__ = __init__


# ------------------------------------------------------------------------------------------------------------ collectives


@patch
def nccl_is_gloo(torch: Any) -> None:
    """Groups of backend "nccl", and the options made for them."""
    from torch.distributed import distributed_c10d as c10d

    def wrap(create: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(create)
        def created(*args: Any, **kwargs: Any) -> Any:
            if args and isinstance(args[0], str):
                args = (args[0].replace("nccl", "gloo"), *args[1:])
            if isinstance(kwargs.get("backend"), str):
                kwargs["backend"] = kwargs["backend"].replace("nccl", "gloo")
            kwargs.pop("device_id", None)
            kwargs.pop("pg_options", None)
            return create(*args, **kwargs)

        return created

    for name in ("init_process_group", "new_group"):
        setattr(c10d, name, wrap(getattr(c10d, name)))
        setattr(torch.distributed, name, getattr(c10d, name))


@patch
def uneven_collectives(torch: Any) -> None:
    """NCCL takes lists of unequal sizes (MoE with TP > 1: tokens per expert); gloo does not."""
    from torch.distributed import distributed_c10d as c10d

    gather, scatter = c10d.all_gather, c10d.reduce_scatter

    @functools.wraps(gather)
    def all_gather(outputs: list[Any], tensor: Any, group: Any = None, async_op: bool = False) -> Any:
        if len({output.shape for output in outputs}) == 1:
            return gather(outputs, tensor, group=group, async_op=async_op)
        padded = torch.zeros(max(len(output) for output in outputs), *tensor.shape[1:], dtype=tensor.dtype)
        padded[: len(tensor)] = tensor
        pieces = [torch.empty_like(padded) for _ in outputs]
        gather(pieces, padded, group=group)
        for output, piece in zip(outputs, pieces, strict=True):
            output.copy_(piece[: len(output)])
        return None

    @functools.wraps(scatter)
    def reduce_scatter(output: Any, inputs: list[Any], op: Any = c10d.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        if len({piece.shape for piece in inputs}) == 1:
            return scatter(output, inputs, op=op, group=group, async_op=async_op)
        whole = torch.cat([piece.contiguous() for piece in inputs])
        c10d.all_reduce(whole, op=op, group=group)
        start = sum(len(piece) for piece in inputs[: c10d.get_rank(group)])
        output.copy_(whole[start : start + len(output)])
        return None

    for function in (all_gather, reduce_scatter):
        setattr(c10d, function.__name__, function)
        setattr(torch.distributed, function.__name__, function)


@patch
def isend_owns_buffer(torch: Any) -> None:
    """The interleaved pipeline frees a sent activation while isend still reads it. NCCL's allocator forgives; gloo sends NaN."""
    from torch.distributed import distributed_c10d as c10d

    isend = c10d.isend

    @functools.wraps(isend)
    def sent(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return isend(tensor.detach().clone(), *args, **kwargs)

    torch.distributed.isend = c10d.isend = sent


@patch
def groups_end_with_the_process(torch: Any) -> None:
    """Megatron ≥ 0.17 leaves its groups open; gloo's threads then abort a good run at exit, now and then (SIGABRT)."""
    from torch.distributed import distributed_c10d as c10d

    atexit.register(lambda: c10d.is_initialized() and c10d.destroy_process_group())


# -------------------------------------------------------------------------------------------------------------- compilers


@patch
def no_compiler(torch: Any) -> None:
    """Compiling a toy takes longer than training it, and wants a C++ compiler."""

    def identity(function: Any = None, *_: Any, **__: Any) -> Any:
        return function if function is not None else lambda decorated: decorated

    torch.compile = torch.jit.script = identity
    if "torch._dynamo" in sys.modules:  # Megatron was imported, and decorated, before us
        torch.compiler.set_stance("force_eager")
