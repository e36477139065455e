"""Modules that leave something behind when they are imported: the source of each, by group and name.

`seen()` tells what has become of it. Some of it is a promise that the test looks into: `drawn` is another value on another rank, `printed`
is found in the output, `gone_at_exit` is not there when the rank has ended, `at_exit` is a file in which the handlers have written.
"""

import re

LITTER = {
    "values and random states": {
        "rank": """
            import os
            RANK = os.environ.get("RANK", 0)
            def seen(): return RANK == os.environ["RANK"]
        """,
        "arguments": """
            import argparse, sys
            parser = argparse.ArgumentParser()
            parser.add_argument("place")
            ARGS, FURTHER = parser.parse_known_args()
            def seen(): return [ARGS.place == sys.argv[1], FURTHER == sys.argv[2:]]
        """,
        "main": """
            import sys
            MAIN = sys.modules["__main__"]
            def seen(): return [MAIN is sys.modules["__main__"], MAIN.__file__ == sys.modules["__main__"].__file__]
        """,
        "time": """
            import os, time
            BEGAN = time.clock_gettime(time.CLOCK_BOOTTIME)
            def seen():
                started = int(open("/proc/self/stat").read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
                return BEGAN >= started - 0.02
        """,
        "pid": """
            import os, threading
            PID, THREAD = os.getpid(), threading.get_native_id()
            def seen(): return [PID == os.getpid(), THREAD == os.getpid()]
        """,
        "name": """
            import uuid
            RUN = uuid.uuid4().hex
            def seen(): return {"drawn": RUN}
        """,
        "temporary folder": """
            import os, tempfile
            FOLDER = tempfile.mkdtemp(dir=os.environ["PLACE"])
            def seen(): return {"drawn": FOLDER, "there": os.path.isdir(FOLDER)}
        """,
        "number": """
            import random
            NUMBER = random.random()
            def seen(): return {"drawn": NUMBER}
        """,
        "port": """
            import socket
            with socket.socket() as taken:
                taken.bind(("127.0.0.1", 0))
                PORT = taken.getsockname()[1]
            def seen(): return {"drawn": PORT}
        """,
        "random.seed": """
            import random
            random.seed(1234)
            def seen(): return random.random()
        """,
        "numpy.random.seed": """
            import numpy
            numpy.random.seed(1234)
            def seen(): return float(numpy.random.rand())
        """,
        "numpy generator": """
            import numpy
            generator = numpy.random.default_rng()
            def seen(): return {"drawn": float(generator.random())}
        """,
        "random generator": """
            import random
            generator = random.Random()
            def seen(): return {"drawn": generator.random()}
        """,
        "hash": """
            ORDER = list({f"key{i}" for i in range(50)})
            def seen(): return ORDER == list({f"key{i}" for i in range(50)})
        """,
        "torch drawn": """
            import torch
            weight = torch.nn.Linear(1, 1).weight.item()
            def seen(): return {"drawn": weight}
        """,
        "torch.manual_seed": """
            import torch
            torch.manual_seed(1234)
            def seen(): return torch.rand(1).item()
        """,
        "torch settings": """
            import torch
            torch.set_default_dtype(torch.float64)
            torch.use_deterministic_algorithms(True)
            torch.set_printoptions(precision=9)
            def seen(): return [str(torch.get_default_dtype()), torch.are_deterministic_algorithms_enabled(), str(torch.ones(1) / 3)]
        """,
    },
    "descriptors, and a child at their other end": {
        "two file handlers": """
            import logging, os
            log = logging.getLogger("kept")
            for name in ("first.log", "second.log"):
                log.addHandler(logging.FileHandler(os.path.join(os.environ["PLACE"], name)))
            def seen():
                log.warning(f"written by {os.getpid()}")
                return [open(handler.baseFilename).read().count(f"by {os.getpid()}") for handler in log.handlers]
        """,
        "open file": """
            import os
            file = open(os.path.join(os.environ["PLACE"], f"written-{os.getpid()}"), "w+")
            file.write("half a line that is not flushed, ")
            def seen():
                file.write("and its end")
                file.seek(0)
                return [file.read(), file.name.endswith(str(os.getpid()))]
        """,
        "read file": """
            import os
            lines = open("/proc/self/status")
            next(lines)
            def seen(): return [next(lines).split(":")[0], os.get_inheritable(lines.fileno()), f"Pid:\\t{os.getpid()}" in lines.read()]
        """,
        "pipe": """
            import os
            reads, writes = os.pipe()
            def seen():
                os.write(writes, b"through")
                return os.read(reads, 10).decode()
        """,
        "socket": """
            import socket
            listening = socket.create_server(("127.0.0.1", 0))
            def seen():
                with socket.create_connection(listening.getsockname(), timeout=5):
                    return listening.accept()[0].fileno() > 0
        """,
        "selector": """
            import os, selectors
            selector, reads_writes = selectors.DefaultSelector(), os.pipe()
            selector.register(reads_writes[0], selectors.EVENT_READ)
            def seen():
                os.write(reads_writes[1], b"1")
                return len(selector.select(1))
        """,
        "event loop": """
            import asyncio
            loop = asyncio.new_event_loop()
            asyncio.set_event_loop(loop)
            def seen(): return loop.run_until_complete(asyncio.sleep(0.01, "slept"))
        """,
        "database": """
            import os, sqlite3
            database = sqlite3.connect(os.path.join(os.environ["PLACE"], "database"), timeout=10, check_same_thread=False)
            database.execute("create table if not exists t (pid)")
            def seen():
                with database: database.execute("insert into t values (?)", (os.getpid(),))
                return database.execute("select count(*) from t where pid=?", (os.getpid(),)).fetchone()
        """,
        "child": """
            import os, subprocess, sys
            echo = "for line in open(0): print(line, end='', flush=True)"
            child = subprocess.Popen([sys.executable, "-c", echo], stdin=-1, stdout=-1, text=True)
            def seen():
                print("there and back", file=child.stdin, flush=True)
                answer = child.stdout.readline()
                ours = os.path.exists(f"/proc/{child.pid}") and f"PPid:\\t{os.getpid()}" in open(f"/proc/{child.pid}/status").read()
                child.stdin.close()
                return [answer, ours, child.wait(5)]
        """,
        "lock file": """
            import fcntl, os
            held = open(os.path.join(os.environ["PLACE"], f"lock-{os.getpid()}"), "w")
            fcntl.flock(held, fcntl.LOCK_EX)
            def seen():
                other = open(held.name)
                try: fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError: return [True, held.name.endswith(str(os.getpid()))]
                return False
        """,
    },
    "multiprocessing": {
        "spawn lock": """
            import multiprocessing
            context = multiprocessing.get_context("spawn")
            lock, value = context.Lock(), context.Value("i", 0)
            def raise_value(lock, value):
                with lock: value.value += 1
            def seen():
                child = context.Process(target=raise_value, args=(lock, value))
                child.start()
                child.join(30)
                return [child.exitcode, value.value]
        """,
        "queue": """
            import multiprocessing, os
            queue = multiprocessing.Queue()
            def seen():
                queue.put(os.getpid())
                return queue.get(timeout=5) == os.getpid()
        """,
        "shared memory": """
            from multiprocessing import shared_memory
            memory = shared_memory.SharedMemory(create=True, size=64)
            def seen():
                other = shared_memory.SharedMemory(memory.name)
                memory.buf[0] = 7
                value = other.buf[0]
                other.close()
                memory.close()
                memory.unlink()
                return {"drawn": memory.name, "value": value}
        """,
        "shared mapping": """
            import mmap, os, time
            memory = mmap.mmap(-1, 4096)
            def seen():
                memory[:12] = f"{os.getpid():<12}".encode()
                time.sleep(0.3)  # for the other rank to do the same
                return "only this process writes it" if int(memory[:12]) == os.getpid() else "another one does"
        """,
        "start method": """
            import multiprocessing
            multiprocessing.set_start_method("spawn", force=True)
            def seen(): return multiprocessing.get_start_method()
        """,
    },
    "threads": {
        "fork pool": """
            import multiprocessing, os
            pool = multiprocessing.get_context("fork").Pool(1)
            def seen():
                mine = pool.apply_async(os.getppid).get(20) == os.getpid()
                pool.terminate()
                return mine
        """,
        "thread": """
            import queue, threading
            asked, answered = queue.Queue(), queue.Queue()
            def work():
                while True: answered.put(asked.get() + 1)
            threading.Thread(target=work, daemon=True).start()
            def seen():
                asked.put(1)
                return answered.get(timeout=5)
        """,
        "thread that has ended": """
            import threading
            done = []
            thread = threading.Thread(target=done.append, args=(1,))
            thread.start()
            thread.join()
            def seen(): return [done, thread.is_alive()]
        """,
        "executor": """
            import concurrent.futures, os
            executor = concurrent.futures.ThreadPoolExecutor(2)
            first = executor.submit(os.getpid).result()
            def seen(): return [executor.submit(int, "7").result(timeout=5), first == os.getpid()]
        """,
        "timer thread": """
            import threading
            rung = threading.Event()
            timer = threading.Timer(0.2, rung.set)
            timer.daemon = True
            timer.start()
            def seen(): return rung.wait(5)
        """,
        "torch store": """
            import torch.distributed
            store = torch.distributed.TCPStore("127.0.0.1", 0, 1, True)
            def seen():
                store.set("key", "value")
                return store.get("key").decode()
        """,
        "locked lock": """
            import threading
            lock = threading.RLock()
            lock.acquire()
            def seen():
                lock.release()
                return "released"
        """,
    },
    "signals and exit": {
        "signal handler": """
            import os, signal
            got = []
            signal.signal(signal.SIGUSR1, lambda number, frame: got.append(number))
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            def seen():
                os.kill(os.getpid(), signal.SIGUSR1)
                return [got, str(signal.getsignal(signal.SIGTERM)), str(signal.getsignal(signal.SIGINT))]
        """,
        "blocked signal": """
            import signal
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
            def seen(): return signal.SIGUSR2 in signal.pthread_sigmask(signal.SIG_BLOCK, [])
        """,
        "interval timer": """
            import signal, time
            rung = []
            signal.signal(signal.SIGALRM, lambda number, frame: rung.append(1))
            signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)
            def seen():
                time.sleep(0.5)
                signal.setitimer(signal.ITIMER_REAL, 0)
                return len(rung) > 0
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
        "temporary directory": """
            import os, tempfile
            folder = tempfile.TemporaryDirectory(dir=os.environ["PLACE"])
            def seen(): return {"drawn": folder.name, "there": os.path.isdir(folder.name), "gone_at_exit": os.path.basename(folder.name)}
        """,
        "fork handler": """
            import os
            forks = []
            os.register_at_fork(after_in_child=lambda: forks.append("child"), before=lambda: forks.append("before"))
            def seen(): return forks
        """,
    },
    "settings": {
        "environment": """
            import os
            os.environ["SET_AT_IMPORT"] = "1"
            os.environ.pop("PROBED", None)
            def seen(): return [os.environ.get("SET_AT_IMPORT"), os.environ.get("PROBED")]
        """,
        "working directory": """
            import os
            os.chdir("/")
            def seen(): return os.getcwd()
        """,
        "umask": """
            import os
            os.umask(0o077)
            def seen(): return oct(os.umask(0o077))
        """,
        "limit": """
            import resource
            resource.setrlimit(resource.RLIMIT_NOFILE, (777, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
            def seen(): return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        """,
        "priority": """
            import os
            os.nice(1)
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
            def seen(): return [os.nice(0), len(os.sched_getaffinity(0))]
        """,
        "sys.path": """
            import sys
            sys.path.insert(0, "/added/at/import")
            def seen(): return [sys.path[0], sys.path.count("/added/at/import")]
        """,
        "warnings": """
            import warnings
            warnings.filterwarnings("ignore", message="only this")
            warnings.warn("told once")
            def seen(): return [warnings.filters[0][0], str(warnings.filters[0][1])]
        """,
        "interpreter": """
            import gc, sys
            gc.disable()
            gc.set_threshold(7, 8, 9)
            sys.setrecursionlimit(1777)
            sys.setswitchinterval(0.123)
            sys.set_int_max_str_digits(0)
            def seen():
                collector = [gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()]
                return [*collector, sys.getrecursionlimit(), round(sys.getswitchinterval(), 3)]
        """,
        "locale": """
            import locale
            locale.setlocale(locale.LC_ALL, "C")
            def seen(): return locale.setlocale(locale.LC_ALL)
        """,
        "decimal": """
            import decimal
            decimal.getcontext().prec = 77
            def seen(): return decimal.getcontext().prec
        """,
        "context variable": """
            import contextvars, threading
            variable, local = contextvars.ContextVar("variable", default="default"), threading.local()
            variable.set("set at import")
            local.value = "set at import"
            def seen(): return [variable.get(), getattr(local, "value", None)]
        """,
        "tracing": """
            import faulthandler, sys, tracemalloc
            tracemalloc.start()
            faulthandler.enable()
            sys.setprofile(lambda frame, event, argument: None)
            def seen(): return [tracemalloc.is_tracing(), faulthandler.is_enabled(), sys.getprofile() is not None]
        """,
    },
    "streams and hooks": {
        "print": """
            import os
            print("printed at import by", os.getpid())
            def seen(): return {"printed": f"printed at import by {os.getpid()}"}
        """,
        "stdout reconfigured": """
            import sys
            KEPT = sys.stdout
            KEPT.reconfigure(encoding="latin-1", errors="ignore")
            def seen(): return [KEPT.encoding, KEPT.errors]
        """,
        "tee": """
            import os, sys
            class Tee:
                def __init__(self, stream): self.stream, self.copy = stream, []
                def write(self, text): self.copy.append(text); return self.stream.write(text)
                def flush(self): self.stream.flush()
            sys.stdout = Tee(sys.stdout)
            def seen():
                print("through the tee of", os.getpid())
                return {"copied": len(sys.stdout.copy) > 0, "printed": f"through the tee of {os.getpid()}"}
        """,
        "stdout by number": """
            import os
            kept = os.dup(1)
            def seen():
                os.write(kept, f"to the stdout that {os.getpid()} had\\n".encode())
                return {"printed": f"to the stdout that {os.getpid()} had"}
        """,
        "stream handler": """
            import logging, os, sys
            logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s of %(process)d")
            def seen():
                logging.info("through the handler")
                return {"printed": f"through the handler of {os.getpid()}"}
        """,
        "excepthook": """
            import sys, threading
            before = sys.excepthook
            sys.excepthook = lambda kind, error, trace: before(kind, error, trace)
            threading.excepthook = lambda words: None
            def seen(): return [sys.excepthook.__module__, threading.excepthook.__module__]
        """,
        "patched": """
            import json
            original = json.dumps
            json.dumps = lambda *words, **named: original(*words, **named)
            def seen(): return json.dumps.__module__
        """,
        "main changed": """
            import sys
            sys.modules["__main__"].put_there_at_import = 1
            def seen(): return hasattr(sys.modules["__main__"], "put_there_at_import")
        """,
        "builtin": """
            import builtins
            builtins.put_there_at_import = 1
            def seen(): return put_there_at_import
        """,
    },
}


def module(name: str) -> str:
    """The name of the module that is made of one."""
    return re.sub("[ .]", "_", name)
