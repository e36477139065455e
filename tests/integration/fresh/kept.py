"""Modules of a user's that leave behind at import what a fork keeps: the source of each, by name.

`seen()` tells what has become of it: the same as in a fresh interpreter. Some of it is a promise that the test looks into: `on_stdout`
and `on_stderr` are found there, `at_exit` is a file in which the handlers have written.
"""

KEPT_BY_A_FORK = {
    "arguments": """
        import argparse, sys
        parser = argparse.ArgumentParser()
        parser.add_argument("place")
        ARGS, FURTHER = parser.parse_known_args()
        def seen(): return [ARGS.place == sys.argv[1], FURTHER == sys.argv[2:], parser.prog]
    """,
    "field types": """
        import argparse, dataclasses
        @dataclasses.dataclass
        class Config:
            steps: int = 3
            rate: float = 0.5
        parser = argparse.ArgumentParser()
        for field in dataclasses.fields(Config):
            parser.add_argument(f"--{field.name}", type=field.type, default=field.default)
        def seen(): return str(parser.parse_known_args(["--steps", "7"])[0])
    """,
    "main": """
        import sys
        MAIN, PROGRAM = sys.modules["__main__"], sys.argv[0]
        SAID = [getattr(MAIN, name, None) for name in ("__name__", "__file__", "__spec__", "__package__")]
        def seen():
            said = [MAIN.__name__, MAIN.__file__, MAIN.__spec__, MAIN.__package__]
            return [MAIN is sys.modules["__main__"], said == SAID, PROGRAM == sys.argv[0]]
    """,
    "main changed": """
        import sys
        sys.modules["__main__"].put_there_at_import = 1
        def seen(): return hasattr(sys.modules["__main__"], "put_there_at_import")
    """,
    "hash": """
        ORDER = list({f"key{i}" for i in range(50)})
        def seen(): return ORDER == list({f"key{i}" for i in range(50)})
    """,
    "seeded generators": """
        import random, numpy, torch
        python, of_numpy, of_torch = random.Random(7), numpy.random.default_rng(7), torch.Generator().manual_seed(7)
        def seen(): return [python.random(), of_numpy.random(), torch.rand(1, generator=of_torch).item()]
    """,
    "settings of torch": """
        import torch
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True)
        torch.set_printoptions(precision=9)
        torch.set_float32_matmul_precision("high")
        torch.autograd.set_detect_anomaly(True)
        torch.set_grad_enabled(False)
        torch.backends.cudnn.benchmark = True
        torch.multiprocessing.set_sharing_strategy("file_system")
        def seen():
            found = [torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), torch.ones(1) / 3]
            found += [torch.get_float32_matmul_precision(), torch.is_anomaly_enabled(), torch.is_grad_enabled()]
            return [str(value) for value in (*found, torch.backends.cudnn.benchmark, torch.multiprocessing.get_sharing_strategy())]
    """,
    "torch patched": """
        import torch
        original = torch.nn.functional.relu
        torch.nn.functional.relu = lambda x: original(x) + 1
        torch.nn.modules.module.register_module_forward_hook(lambda module, given, result: result * 2)
        def seen(): return torch.nn.Identity()(torch.nn.functional.relu(torch.ones(1))).item()
    """,
    "operator of its own": """
        import torch
        @torch.library.custom_op("kept_by_a_fork::double", mutates_args=())
        def double(x: torch.Tensor) -> torch.Tensor: return x * 2
        @torch.jit.script
        def triple(x): return x * 3
        def seen(): return [double(torch.ones(1)).item(), triple(torch.ones(1)).item()]
    """,
    "database in memory": """
        import sqlite3
        database = sqlite3.connect(":memory:", check_same_thread=False)
        database.execute("create table t (n)")
        def seen():
            database.execute("insert into t values (1)")
            return database.execute("select count(*) from t").fetchone()
    """,
    "private memory": """
        import mmap
        memory = mmap.mmap(-1, 100, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory[:4] = b"kept"
        def seen(): return memory[:5].decode()
    """,
    "locks and queues": """
        import concurrent.futures, queue, threading
        lock, waiting, executor = threading.RLock(), queue.Queue(), concurrent.futures.ThreadPoolExecutor(1)
        lock.acquire()
        waiting.put(1)
        def seen():
            lock.release()
            return [waiting.get(), executor.submit(int, "7").result(timeout=5)]
    """,
    "start method": """
        import multiprocessing
        multiprocessing.set_start_method("spawn", force=True)
        def seen(): return multiprocessing.get_start_method()
    """,
    "exit handler": """
        import atexit, os, weakref
        class Kept: pass
        kept = Kept()
        def say(what): open(os.path.join(os.environ["PLACE"], f"exit-{os.getpid()}"), "a").write(what)
        atexit.register(say, "exit handler, ")
        weakref.finalize(kept, say, "finalizer, ")
        def seen(): return {"at_exit": f"exit-{os.getpid()}"}
    """,
    "environment": """
        import os
        os.environ["SET_AT_IMPORT"] = "1"
        os.environ.setdefault("ALSO_SET", "2")
        os.environ.pop("PROBED", None)
        def seen(): return [os.environ.get("SET_AT_IMPORT"), os.getenv("ALSO_SET"), os.environ.get("PROBED")]
    """,
    "warnings": """
        import warnings
        warnings.filterwarnings("ignore", message="only this")
        warnings.warn("only this")
        def seen(): return [warnings.filters[0][0], str(warnings.filters[0][1])]
    """,
    "logging": """
        import logging, os
        logging.basicConfig(level=logging.INFO, format="%(levelname)s of %(process)d: %(message)s")
        logging.addLevelName(25, "NOTICE")
        log = logging.getLogger("kept")
        def seen():
            log.log(25, "through the handler")
            return {"on_stderr": f"NOTICE of {os.getpid()}: through the handler"}
    """,
    "printed": """
        import sys, warnings
        print("printed at import")
        print("error at import", file=sys.stderr)
        warnings.warn("warned at import")
        def seen(): return {"on_stderr": "UserWarning: warned at import", "on_stdout": "printed at import"}
    """,
    "end of sys.path": """
        import sys
        sys.path.append("/added/at/import")
        def seen(): return [sys.path[-1], sys.path.count("/added/at/import")]
    """,
    "interpreter": """
        import gc, sys
        gc.disable()
        gc.set_threshold(7, 8, 9)
        sys.setrecursionlimit(1777)
        sys.setswitchinterval(0.123)
        sys.set_int_max_str_digits(0)
        sys.dont_write_bytecode = True
        heard = []
        sys.addaudithook(lambda event, words: heard.append(event) if event == "kept" else None)
        def seen():
            sys.audit("kept")
            collector = [gc.isenabled(), gc.get_threshold(), gc.get_freeze_count() > 1000]  # Python 3.12 starts with some
            return [*collector, sys.getrecursionlimit(), round(sys.getswitchinterval(), 3), sys.dont_write_bytecode, heard]
    """,
    "locale": """
        import locale
        locale.setlocale(locale.LC_ALL, "C")
        def seen(): return locale.setlocale(locale.LC_ALL)
    """,
    "of the thread": """
        import asyncio, contextvars, decimal, threading
        decimal.getcontext().prec = 77
        variable, local = contextvars.ContextVar("variable", default="default"), threading.local()
        variable.set("set at import")
        local.value = "set at import"
        def seen(): return [decimal.getcontext().prec, variable.get(), getattr(local, "value", None), asyncio.run(told())]
        async def told(): return variable.get()
    """,
    "tracing": """
        import sys, threading, tracemalloc
        tracemalloc.start()
        threading.setprofile(print)
        threading.settrace(None)
        def seen():
            found = [tracemalloc.is_tracing(), threading._profile_hook is print]
            threading.setprofile(None)
            return found
    """,
    "patched": """
        import builtins, codecs, json, os, socket, sys, threading
        original = json.dumps
        json.dumps = lambda *words, **named: original(*words, **named)
        os.cpu_count = lambda: 77
        socket.setdefaulttimeout(77)
        builtins.put_there_at_import = 1
        threading.excepthook = lambda words: None
        codecs.register(lambda name: codecs.lookup("utf-8") if name == "kept" else None)
        sys.ps1 = "kept> "
        def seen():
            found = [json.dumps.__module__, os.cpu_count(), socket.getdefaulttimeout(), put_there_at_import, sys.ps1]
            return [*found, threading.excepthook.__module__, "é".encode("kept").hex()]
    """,
    "finders": """
        import importlib.abc, importlib.util, sys, types
        class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
            def find_spec(self, name, path, target=None):
                return importlib.util.spec_from_loader(name, self) if name == "found_by_the_finder" else None
            def create_module(self, spec): return None
            def exec_module(self, module): module.value = 7
        sys.meta_path.insert(0, Finder())
        def hook(path): raise ImportError(path)
        sys.path_hooks.append(hook)
        def seen():
            import found_by_the_finder
            return [found_by_the_finder.value, hook in sys.path_hooks, sum(isinstance(finder, Finder) for finder in sys.meta_path)]
    """,
    "itself": """
        import sys, types
        class Lazy(types.ModuleType):
            def __getattr__(self, name): return name
            def seen(self): return [self.anything, sys.modules[__name__] is self]
        sys.modules[__name__] = Lazy(__name__)
    """,
}
