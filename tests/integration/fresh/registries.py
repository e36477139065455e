"""What the standard library keeps by itself in each process: threads, finalizers, caches, the next names, loggers, filters, clocks."""

import asyncio
import concurrent.futures.thread
import contextvars
import decimal
import linecache
import logging
import multiprocessing
import multiprocessing.process
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import socket
import sys
import tempfile
import threading
import time
import warnings
import weakref


def threads() -> dict[str, object]:
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


def registries() -> dict[str, object]:
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


def counters() -> dict[str, object]:
    """Names that the next thread, process, task and pool get."""
    pool = concurrent.futures.ThreadPoolExecutor(1)
    named = pool.submit(lambda: threading.current_thread().name).result()
    pool.shutdown()

    async def task() -> str:
        current = asyncio.current_task()
        return current.get_name() if current else ""

    process = multiprocessing.get_context("fork").Process(target=int)
    return {"thread": threading.Thread().name, "pool": named, "process": process.name, "task": asyncio.run(task())}


def log() -> dict[str, object]:
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
        "started_now": time.time() - logging._startTime < 60,  # type: ignore[attr-defined]
    }


def warned() -> dict[str, object]:
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


def clocks() -> dict[str, object]:
    import psutil

    created = psutil.Process().create_time()
    return {
        "cpu_s_below_20": time.process_time() < 20,
        "logging_after_process_s": logging._startTime >= created - 0.1,  # type: ignore[attr-defined]
        "lived_s_below_60": time.time() - created < 60,
    }
