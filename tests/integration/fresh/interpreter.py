"""What a program can see of its interpreter: settings, streams, modules and where they are looked for, hooks, locale."""

import builtins
import codecs
import faulthandler
import gc
import locale
import os
import sys
import threading
import time
import tracemalloc
from importlib.machinery import ModuleSpec

from fresh import libraries, own_module, registries


def observe(script: dict[str, object]) -> dict[str, object]:
    """script: its globals."""
    return {
        "sys": _sys(),
        "paths": _paths(),
        "main": own_module.main(script),
        "stack": own_module.stack(),
        "streams": {name: _stream(name) for name in ("stdin", "stdout", "stderr")},
        "hooks": _hooks(),
        "environ": dict(sorted(os.environ.items())),
        "environb": {
            name.decode(errors="replace"): value.decode(errors="replace") for name, value in os.environb.items()
        },
        "warnings": registries.warned(),
        "locale": _locale(),
        "threads": registries.threads(),
        "registries": registries.registries(),
        "counters": registries.counters(),
        "logging": registries.log(),
        "gc": {
            "on": gc.isenabled(),
            "thresholds": gc.get_threshold(),
            "frozen": gc.get_freeze_count(),
            "debug": gc.get_debug(),
            "callbacks": len(gc.callbacks),
            "garbage": len(gc.garbage),
        },
        "clocks": registries.clocks(),
        "drawn": libraries.drawn(),
    }


def specs(known: dict[str, ModuleSpec | None]) -> dict[str, object]:
    """Where modules come from, by name."""
    return {name: _spec(spec) for name, spec in sorted(known.items())}


def _sys() -> dict[str, object]:
    found: dict[str, object] = {}
    for name in sorted(dir(sys)):
        value = getattr(sys, name)
        if name in ("path", "modules", "path_importer_cache", "warnoptions") or callable(value):
            continue
        found[name] = value if own_module.simple(value) else type(value).__name__
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


def _locale() -> dict[str, object]:
    return {
        "ctype": locale.setlocale(locale.LC_CTYPE),
        "all": locale.setlocale(locale.LC_ALL),
        "preferred": locale.getpreferredencoding(False),
        "encoding": locale.getencoding(),
        "zone": time.tzname,
        "codecs": codecs.lookup("utf-8").name,
    }
