"""What a program can see of its interpreter: settings, streams, modules, its own `__main__`, hooks, registries, random numbers."""

import asyncio
import builtins
import codecs
import concurrent.futures.thread
import contextvars
import ctypes
import decimal
import faulthandler
import gc
import importlib
import inspect
import linecache
import locale
import logging
import multiprocessing
import multiprocessing.process
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import pickle
import random
import re
import socket
import sys
import tempfile
import threading
import time
import traceback
import tracemalloc
import types
import warnings
import weakref
from importlib.machinery import ModuleSpec

SIMPLE = (str, int, float, bool, bytes, type(None))


def observe(script: dict[str, object]) -> dict[str, object]:
    """script: its globals."""
    return {
        "sys": _sys(),
        "paths": _paths(),
        "main": _main(script),
        "stack": _stack(),
        "streams": {name: _stream(name) for name in ("stdin", "stdout", "stderr")},
        "hooks": _hooks(),
        "environ": dict(sorted(os.environ.items())),
        "environb": {
            name.decode(errors="replace"): value.decode(errors="replace") for name, value in os.environb.items()
        },
        "warnings": _warnings(),
        "locale": _locale(),
        "threads": _threads(),
        "registries": _registries(),
        "counters": _counters(),
        "logging": _logging(),
        "gc": {
            "on": gc.isenabled(),
            "thresholds": gc.get_threshold(),
            "frozen": gc.get_freeze_count(),
            "debug": gc.get_debug(),
            "callbacks": len(gc.callbacks),
            "garbage": len(gc.garbage),
        },
        "clocks": _clocks(),
        "drawn": _drawn(),
    }


def specs(known: dict[str, ModuleSpec | None]) -> dict[str, object]:
    """Where modules come from, by name."""
    return {name: _spec(spec) for name, spec in sorted(known.items())}


def _simple(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return all(_simple(item) for item in value)
    return isinstance(value, SIMPLE)


def _sys() -> dict[str, object]:
    found: dict[str, object] = {}
    for name in sorted(dir(sys)):
        value = getattr(sys, name)
        if name in ("path", "modules", "path_importer_cache", "warnoptions") or callable(value):
            continue
        found[name] = value if _simple(value) else type(value).__name__
    named = ("flags", "float_info", "hash_info", "int_info", "thread_info")
    found |= {name: repr(getattr(sys, name)) for name in named}
    asked = (
        "getrecursionlimit",
        "getswitchinterval",
        "get_int_max_str_digits",
        "getdlopenflags",
        "getprofile",
        "gettrace",
    )
    asked += (
        "getdefaultencoding",
        "getfilesystemencoding",
        "getfilesystemencodeerrors",
        "get_coroutine_origin_tracking_depth",
    )
    found |= {name: getattr(sys, name)() for name in asked}
    return found | {
        "warnoptions": sys.warnoptions,
        "asyncgen_hooks": repr(sys.get_asyncgen_hooks()),
        "names": sorted(dir(sys)),
    }


def _paths() -> dict[str, object]:
    return {
        "path": list(sys.path),
        "meta_path": [getattr(finder, "__qualname__", type(finder).__qualname__) for finder in sys.meta_path],
        "path_hooks": [getattr(hook, "__qualname__", repr(hook)) for hook in sys.path_hooks],
        "importer_cache": sorted(map(str, sys.path_importer_cache)),
    }


def _spec(spec: ModuleSpec | None) -> dict[str, object]:
    if spec is None:
        return {"spec": None}
    module = sys.modules.get(spec.name)
    return {
        "origin": spec.origin,
        "loader": getattr(spec.loader, "__qualname__", type(spec.loader).__qualname__),
        "file": getattr(module, "__file__", None),
        "cached": getattr(module, "__cached__", None),
    }


def _main(script: dict[str, object]) -> dict[str, object]:
    """The script's own module: attributes, order and kind; what finds it again by name, source or pickle."""
    main = sys.modules["__main__"]
    own = {name: value for name, value in script.items() if re.fullmatch("__.*__", name)}
    thing = script.get("Thing")
    found: dict[str, object] = {
        "names": list(own),
        "values": {name: _shape(value) for name, value in own.items() if name != "__annotations__"},
        "is_globals": main.__dict__ is script,
        "type": type(main).__qualname__,
        "repr": re.sub("0x[0-9a-f]+", "", repr(main)),
        "annotations": {name: _shape(value) for name, value in getattr(thing, "__annotations__", {}).items()},
        "of_module": {name: _shape(value) for name, value in script.get("__annotations__", {}).items()},  # type: ignore[attr-defined]
    }
    if thing is not None:
        found["pickled"] = _tried(lambda: type(pickle.loads(pickle.dumps(thing()))) is thing)  # type: ignore[operator]
        found["source"] = _tried(lambda: inspect.getsource(thing))  # type: ignore[arg-type]
        found["source_file"] = _tried(lambda: inspect.getsourcefile(thing))  # type: ignore[arg-type]
        found["method_file"] = thing.method.__code__.co_filename  # type: ignore[attr-defined]
    found["loader_source"] = _tried(lambda: len(main.__loader__.get_source("__main__")))  # type: ignore[union-attr]
    found["imported_again"] = _tried(lambda: importlib.import_module("__main__") is main)
    found["line"] = _tried(lambda: linecache.getline(str(script.get("__file__")), 1))
    return found


def _shape(value: object) -> object:
    if _simple(value):
        return value
    if isinstance(value, type):
        return value.__qualname__
    if isinstance(value, types.ModuleType):
        return f"module {value.__name__}"
    if isinstance(value, dict):
        return f"dict of {len(value)}" if len(value) > 20 else "dict"
    if isinstance(value, ModuleSpec):
        return {
            "name": value.name,
            "origin": value.origin,
            "loader": type(value.loader).__qualname__,
            "parent": value.parent,
            "has_location": value.has_location,
            "cached": value.cached,
        }
    text = type(value).__qualname__
    return text + str({k: v for k, v in vars(value).items() if _simple(v)} if hasattr(value, "__dict__") else "")


def _tried(what):  # type: ignore[no-untyped-def]
    try:
        return _shape(what())
    except BaseException as error:
        return f"{type(error).__name__}: {error}"


def _stack() -> dict[str, object]:
    """Who called the script: nobody, as it can see."""
    frame: types.FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") != "__main__":
        frame = frame.f_back
    below = []
    while frame is not None:
        below.append(f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_code.co_name}")
        frame = frame.f_back

    def deep(n: int) -> int:
        try:
            return deep(n + 1)
        except RecursionError:
            return n

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.warn("from outside of the script", stacklevel=2 + len(inspect.stack()))
    return {
        "below": below[1:],
        "handling": repr(sys.exc_info()[0]),
        "last": hasattr(sys, "last_type"),
        "depth": (deep(0) + len(traceback.extract_stack())) // 4 * 4,
        "warned_at": [f"{w.filename}:{w.lineno}" for w in caught],
    }


def _stream(which: str) -> object:
    stream = getattr(sys, which)
    if stream is None:
        return None
    names = ("name", "mode", "encoding", "errors", "newlines", "line_buffering", "write_through", "closed")
    found = {name: getattr(stream, name, "none") for name in names}
    buffer = getattr(stream, "buffer", None)
    raw = getattr(buffer, "raw", None)
    found |= {"type": type(stream).__name__, "buffer": type(buffer).__name__, "raw": type(raw).__name__}
    found |= {"buffer_name": getattr(buffer, "name", None), "buffer_mode": getattr(buffer, "mode", None)}
    found |= {"isatty": stream.isatty(), "fileno": stream.fileno(), "inode": _same(stream.fileno())}
    found["original"] = getattr(sys, f"__{which}__") is stream
    return found


def _same(descriptor: int) -> str:
    about = os.fstat(descriptor)
    return next((name for name in ("/dev/null",) if os.path.samestat(about, os.stat(name))), "other")


def _hooks() -> dict[str, object]:
    hooks = {name: getattr(sys, name) for name in ("excepthook", "displayhook", "unraisablehook", "breakpointhook")}
    found = {name: getattr(hook, "__module__", "") + "." + hook.__qualname__ for name, hook in hooks.items()}
    found["original"] = str(sys.excepthook is sys.__excepthook__)
    found["threading"] = threading.excepthook.__module__ + "." + threading.excepthook.__qualname__
    found["threads_trace"] = repr(threading._trace_hook)  # type: ignore[attr-defined]
    found["import"] = builtins.__import__.__module__
    found["builtins"] = str(sorted(name for name in dir(builtins)))
    changed = [
        name
        for name in dir(builtins)
        if getattr(getattr(builtins, name), "__module__", "builtins")
        not in ("builtins", "_sitebuiltins", "io", "_io", "_frozen_importlib", "exceptiongroup", None)
    ]
    found["builtins_changed"] = str(changed)
    found["faulthandler"] = str(faulthandler.is_enabled())
    found["tracemalloc"] = str(tracemalloc.is_tracing())
    return found


def _warnings() -> dict[str, object]:
    return {
        "filters": [
            [f[0], getattr(f[1], "pattern", f[1]), f[2].__name__, getattr(f[3], "pattern", f[3]), f[4]]
            for f in warnings.filters
        ],
        "once": sorted(map(str, warnings.onceregistry)),  # type: ignore[attr-defined]
        "default": warnings.defaultaction,  # type: ignore[attr-defined]
        "showwarning": warnings.showwarning.__module__,
        "formatwarning": warnings.formatwarning.__module__,
    }


def _locale() -> dict[str, object]:
    return {
        "ctype": locale.setlocale(locale.LC_CTYPE),
        "all": locale.setlocale(locale.LC_ALL),
        "preferred": locale.getpreferredencoding(False),
        "encoding": locale.getencoding(),
        "zone": time.tzname,
        "codecs": codecs.lookup("utf-8").name,
    }


def _threads() -> dict[str, object]:
    main = threading.main_thread()
    return {
        "names": sorted(thread.name for thread in threading.enumerate()),
        "main": [
            main.name,
            main.ident == threading.get_ident(),
            main.native_id == os.getpid() == threading.get_native_id(),
            main.daemon,
        ],
        "current": threading.current_thread() is main,
        "frames": len(sys._current_frames()),
        "dangling": len(list(threading._dangling)),  # type: ignore[attr-defined]
        "stack_size": threading.stack_size(),
    }


def _registries() -> dict[str, object]:
    tracker = multiprocessing.resource_tracker._resource_tracker
    return {
        "weakref_finalize": len(weakref.finalize._registry),  # type: ignore[attr-defined]
        "mp_finalizers": len(multiprocessing.util._finalizer_registry),
        "mp_start_method": multiprocessing.get_start_method(allow_none=True),
        "mp_process": [
            multiprocessing.current_process().name,
            multiprocessing.current_process().pid == os.getpid(),
            multiprocessing.parent_process() is None,
        ],
        "mp_children": len(multiprocessing.active_children()),
        "mp_config": {k: v for k, v in multiprocessing.process.current_process()._config.items() if k != "authkey"},
        "mp_tracker": [tracker._fd, getattr(tracker, "_pid", None)],
        "mp_tempdir": multiprocessing.current_process()._config.get("tempdir"),
        "threading_atexit": len(threading._threading_atexits),  # type: ignore[attr-defined]
        "futures_queues": len(concurrent.futures.thread._threads_queues),
        "tempdir": tempfile.tempdir,
        "gettempdir": tempfile.gettempdir(),
        "socket_timeout": socket.getdefaulttimeout(),
        "decimal": repr(decimal.getcontext()),
        "context": [variable.name for variable in contextvars.copy_context()],
        "loop_policy": repr(asyncio.events._event_loop_policy),  # type: ignore[attr-defined]
        "linecache": len(linecache.cache) if "torch" not in sys.modules else 0,
    }


def _counters() -> dict[str, object]:
    """Names that the next thread, process, task and pool get."""
    pool = concurrent.futures.ThreadPoolExecutor(1)
    named = pool.submit(lambda: threading.current_thread().name).result()
    pool.shutdown()

    async def task() -> str:
        current = asyncio.current_task()
        return current.get_name() if current else ""

    process = multiprocessing.get_context("fork").Process(target=int)
    return {"thread": threading.Thread().name, "pool": named, "process": process.name, "task": asyncio.run(task())}


def _logging() -> dict[str, object]:
    loggers = {name: log for name, log in logging.root.manager.loggerDict.items() if isinstance(log, logging.Logger)}
    set_up = {
        name: [log.level, log.propagate, log.disabled, [type(h).__name__ for h in log.handlers]]
        for name, log in sorted(loggers.items())
        if log.level or log.handlers or not log.propagate or log.disabled
    }
    return {
        "root": [logging.root.level, [type(h).__name__ for h in logging.root.handlers]],
        "disabled": logging.root.manager.disable,
        "class": logging.getLoggerClass().__qualname__,
        "factory": logging.getLogRecordFactory().__qualname__,
        "loggers": set_up,
        "handlers": len(logging._handlerList),  # type: ignore[attr-defined]
        "levels": logging.getLevelNamesMapping(),
        "started_now": time.time() - logging._startTime < 30,  # type: ignore[attr-defined]
    }


def _clocks() -> dict[str, object]:
    import psutil

    created = psutil.Process().create_time()
    return {
        "cpu_s_below_5": time.process_time() < 5,
        "logging_after_process_s": logging._startTime >= created - 0.1,  # type: ignore[attr-defined]
        "lived_s_below_10": time.time() - created < 10,
    }


def _drawn() -> dict[str, object]:
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
        "uuid1_clock": importlib.import_module("uuid").uuid1().clock_seq,
    }


def libraries() -> dict[str, object]:
    """What torch and numpy are like after the script has imported them itself."""
    import numpy
    import torch
    import torch.distributed

    return {
        "logging": _logging(),
        "warnings": _warnings(),
        "atexit_callbacks": importlib.import_module("atexit")._ncallbacks(),
        "mp_start_method": multiprocessing.get_start_method(allow_none=True),
        "mp_finalizers": len(multiprocessing.util._finalizer_registry),
        "weakref_finalize": len(weakref.finalize._registry),  # type: ignore[attr-defined]
        "gc": [gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()],
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "tasks": len(os.listdir("/proc/self/task")),
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
