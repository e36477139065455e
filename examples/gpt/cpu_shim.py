"""Map torch.cuda to the CPU, so that unmodified Megatron code trains on CPU tensors with gloo.

Moore Threads maps torch.cuda to torch.musa with a similar patch. Call `install()` after `import torch` and before any import of Megatron.
Modules of Megatron that are already imported are patched in place. `install()` reads no rank or other fact about its process, so processes
forked later may become any rank.

Each patch is a named function with its reason. `MCORE_CPU_SHIM_SKIP=name,name` skips the named patches. Runs without single patches showed
that all patches are needed. Patches for gloo's limits are in `cpu_shim_gloo.py`, patches of Megatron's own modules in
`cpu_shim_megatron.py`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import after_import

PATCHES: list[after_import.Change] = []
"""The changes that `install` makes to torch, besides those of cpu_shim_gloo."""
patch = after_import.into(PATCHES)


def install() -> None:
    """Map torch.cuda to the CPU in this process. A second call does no harm."""
    import torch
    import torch.distributed

    if getattr(torch.cuda, "is_cpu_shim", False):
        return
    torch.cuda.is_cpu_shim = True
    import cpu_shim_gloo
    import cpu_shim_megatron  # noqa: F401  (registers its changes)

    for change in filter(after_import.wanted, [*PATCHES, *cpu_shim_gloo.PATCHES]):
        change(torch)
    after_import.watch()
    for name in after_import.CHANGES.keys() & sys.modules.keys() - {"torch"}:
        after_import.apply(name, sys.modules[name])
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron asserts it when TP > 1


def _is_cuda(device: Any) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    return getattr(device, "type", None) == "cuda" or (isinstance(device, int) and not isinstance(device, bool))


# ---------------------------------------------------------------------------------------------------------------- device


@patch
def device_queries(torch: Any) -> None:
    """Megatron passes the result of current_device() on as `device=…`, so it has to be a CPU device.

    Each query gets a function of its own: torch._dynamo, which torch.optim imports, keeps a table of these functions and accepts each only
    once.
    """
    cuda, cpu = torch.cuda, torch.device("cpu")
    cuda.is_available = lambda: True
    cuda.is_initialized = lambda: True
    cuda._lazy_init = lambda: None
    cuda._lazy_call = lambda callback, **_: callback()
    cuda.device_count = lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # forked ranks get it after `install`
    cuda.current_device = lambda: cpu
    cuda.set_device = lambda device: None
    cuda.synchronize = lambda device=None: None
    cuda.device = lambda device=None: contextlib.nullcontext()
    cuda.get_device_capability = lambda device=None: (8, 0)
    cuda.is_current_stream_capturing = lambda: False
    cuda.get_device_properties = lambda device=None: SimpleNamespace(
        name="cpu", major=8, minor=0, total_memory=1 << 34, multi_processor_count=1
    )


@patch
def accelerator(torch: Any) -> None:
    """Report no accelerator. Without this, a CUDA build of torch on a machine without a driver would now report one."""
    if torch.backends.cuda.is_built():
        torch.accelerator.is_available = lambda: False
        torch.accelerator.current_accelerator = lambda *_, **__: None


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
    """Replace streams by empty ones. MoE dispatchers and optimizer offload use streams to order their work, but on a CPU work runs in
    program order."""
    cuda, default = torch.cuda, _Stream()
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.current_stream = lambda device=None: default
    cuda.default_stream = lambda device=None: default
    cuda.stream = lambda stream=None: contextlib.nullcontext()
    torch.Tensor.record_stream = lambda self, stream: None


# ------------------------------------------------------------------------------------------------------------- randomness


@patch
def rng(torch: Any) -> None:
    """Use the CPU's generator as the device's: dropout draws from it. Sharing is safe, because Megatron's tracker swaps whole states."""
    cuda = torch.cuda

    def get(device: Any = None) -> Any:
        return torch.get_rng_state()

    def put(state: Any, device: Any = None) -> None:
        torch.set_rng_state(state)

    def seed(value: int) -> None:  # not torch.manual_seed, which calls torch.cuda.manual_seed_all
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
    logging.getLogger(
        "megatron.core.tensor_parallel.random"
    ).addFilter(  # this logger warns of the sharing at every fork
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )


@patch
def loader_rng(torch: Any) -> None:
    """Give loaders a generator of their own. A loader without a generator would draw its seed from the CPU generator, which dropout uses
    here."""
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
    """Make `.cuda()`, `.to("cuda")` and `.pin_memory()` leave tensors where they are."""
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
    """Make `torch.zeros(…, device="cuda")` and similar functions create CPU tensors."""
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

    for owner, names in (
        (torch, f"{plain} {likes}"),
        (torch.Tensor, "new_zeros new_ones new_empty new_full new_tensor"),
    ):
        for name in names.split():
            setattr(owner, name, wrap(getattr(owner, name)))


@patch
def legacy_types(torch: Any) -> None:
    """Support the old type names. Optimizers sort parameters by `p.type() == "torch.cuda.FloatTensor"`; clipping builds
    torch.cuda.FloatTensor([…])."""
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
    """Make `is_cuda` true, because Megatron's checkpoint writer and MoE permutation check it."""
    torch.Tensor.is_cuda = property(lambda self: True)


# -------------------------------------------------------------------------------------------------------------- compilers


@patch
def no_compiler(torch: Any) -> None:
    """Turn compilation off: compiling a toy model takes longer than training it, and needs a C++ compiler."""

    def identity(function: Any = None, *_: Any, **__: Any) -> Any:
        return function if function is not None else lambda decorated: decorated

    torch.compile = torch.jit.script = identity
    if "torch._dynamo" in sys.modules:  # Megatron was imported earlier, and its functions are decorated already
        torch.compiler.set_stance("force_eager")
