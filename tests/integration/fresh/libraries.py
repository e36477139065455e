"""Numbers that are drawn unseeded, and what torch and numpy are like once the script has imported them."""

import ctypes
import gc
import importlib
import multiprocessing
import multiprocessing.process
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import random
import sys
import tempfile
import time
import weakref

from fresh.registries import log, warned


def drawn() -> dict[str, object]:
    """Numbers that ranks draw unseeded: alike or not alike on two ranks, and in two lives."""
    libc = ctypes.CDLL(None)
    return {
        "random": random.getrandbits(64),
        "gauss_next": random.getstate()[2],
        "hash": hash("a string"),
        "authkey": multiprocessing.current_process().authkey.hex(),
        "urandom": os.urandom(8).hex(),
        "tempname": next(tempfile._get_candidate_names()),  # type: ignore[attr-defined]
        "libc_rand": libc.rand(),
    }


def libraries() -> dict[str, object]:
    """What torch and numpy are like after the script has imported them itself."""
    import numpy
    import torch
    import torch.distributed

    return {
        "logging": log(),
        "warnings": warned(),
        "atexit_callbacks": importlib.import_module("atexit")._ncallbacks(),
        "mp_start_method": multiprocessing.get_start_method(allow_none=True),
        "mp_finalizers": len(multiprocessing.util._finalizer_registry),
        "weakref_finalize": len(weakref.finalize._registry),  # type: ignore[attr-defined]
        "gc": [gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()],
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "tasks": _tasks(),
        "dtype": str(torch.get_default_dtype()),
        "device": str(torch.get_default_device()),
        "grad": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cuda": [torch.cuda.is_available(), torch.cuda.is_available.__module__, torch.cuda.device_count()],
        "initialized": torch.distributed.is_initialized(),
        "sharing": torch.multiprocessing.get_sharing_strategy(),
        "precision": torch.get_float32_matmul_precision(),
        "printing": repr(vars(torch._tensor_str.PRINT_OPTS)),
        "excepthook": sys.excepthook.__module__,
        "numpy_errors": numpy.geterr(),
        "numpy_printing": repr(numpy.get_printoptions()),
        "dlopen": sys.getdlopenflags(),
        "ordered": [name for name in ("torch", "numpy", "torch.distributed") if name in sys.modules],
    }


def _tasks() -> int:
    """How many threads this process has. One that has ended may be listed for a moment."""
    last = len(os.listdir("/proc/self/task"))
    for _ in range(10):
        time.sleep(0.1)
        now = len(os.listdir("/proc/self/task"))
        if now >= last:
            break
        last = now
    return last


def drawn_by_libraries() -> dict[str, object]:
    """As `_drawn`, of torch and numpy, from their global generators and from a new one."""
    import numpy
    import torch

    return {
        "torch_seed": torch.initial_seed(),
        "torch": torch.randint(2**40, (1,)).item(),
        "torch_generator": torch.randint(2**40, (1,), generator=torch.Generator()).item(),
        "numpy": int(numpy.random.randint(2**40)),
        "numpy_generator": int(numpy.random.default_rng().integers(2**40)),
    }
