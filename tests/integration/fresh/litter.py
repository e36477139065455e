"""Modules of a user's that do at import what a forked rank cannot have from its parent: the source of each, by name.

Each stands for a kind. The warm process's watch finds each, and leaves it and what follows to the ranks.
"""

LITTER = {
    # -- values that are another one in each rank, or at each start
    "rank and time": """
        import os, time
        RANK = os.environ.get("RANK", 0)
        BEGAN = time.clock_gettime(time.CLOCK_BOOTTIME)
        def seen():
            started = int(open("/proc/self/stat").read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
            return [RANK == os.environ["RANK"], BEGAN >= started - 0.02]
    """,
    "constant of the script": """
        import __main__
        SCALE = getattr(__main__, "SCALE", 1.0)
        def seen():
            return SCALE
    """,
    "names of the script": "import __main__; NAMES = sorted(vars(__main__))",
    "rank by get": "import os; RANK = os.environ.get('RANK', 0)",
    "rank by getenv": "import os; RANK = os.getenv('LOCAL_RANK')",
    "rank asked for": "import os; DISTRIBUTED = 'WORLD_SIZE' in os.environ",
    "rank in bytes": "import os; RANK = os.environb.get(b'RANK')",
    "rank of getenvb": "import os; RANK = os.getenvb(b'RANK')",
    "rank with a default": "import os; os.environ.setdefault('RANK', '0')",
    "rank expanded": "import os; NAME = os.path.expandvars('log-$RANK')",
    "environment copied": "import os; ENVIRONMENT = os.environ.copy()",
    "environment as dict": "import os; ENVIRONMENT = {**os.environ, 'A': '1'}",
    "environment looked through": "import os; OURS = [name for name in os.environ if name.startswith('RA')]",
    "environment's items": "import os; OURS = dict(os.environ.items())",
    "process id": "import os; PID = os.getpid()",
    "parent": "import os; PARENT = os.getppid()",
    "group": "import os; GROUP = os.getpgrp(), os.getsid(0)",
    "thread id": "import threading; THREAD = threading.get_native_id()",
    "name of the process": "import multiprocessing; PID = multiprocessing.current_process().pid or multiprocessing.process.os.getpid()",
    "time": "import time; BEGAN = time.time()",
    "time of a clock": "import time; BEGAN = time.clock_gettime(time.CLOCK_BOOTTIME)",
    "time used": "import time; USED = time.process_time(), time.thread_time()",
    "datetime": "import datetime; BEGAN = datetime.datetime.now(datetime.timezone.utc)",
    "datetime of a class": "import datetime\nclass Own(datetime.datetime): pass\nBEGAN = Own.now()",
    "date": "import datetime; DAY = f'{datetime.date.today():%Y-%m-%d}'",
    "times": "import os; USED = os.times()",
    "log record": "import logging; log = logging.getLogger('q'); log.addHandler(logging.NullHandler()); log.error('at import')",
    "uuid4": "import uuid; RUN = uuid.uuid4().hex",
    "uuid1": "import uuid; RUN = uuid.uuid1().hex",
    "secret": "import secrets; TOKEN = secrets.token_hex(4)",
    "urandom": "import os; TOKEN = os.urandom(4)",
    "random number": "import random; NUMBER = random.random()",
    "random state": "import random; STATE = random.getstate()",
    "random seed": "import random; random.seed(1234)",
    "random generator": "import random; generator = random.Random()",
    "random choice of the system": "import random; NUMBER = random.SystemRandom().random()",
    "numpy number": "import numpy; NUMBER = numpy.random.rand()",
    "numpy seed": "import numpy; numpy.random.seed(1234)",
    "numpy generator": "import numpy; generator = numpy.random.default_rng()",
    "numpy state": "import numpy; generator = numpy.random.RandomState()",
    "torch number": "import torch; NUMBER = torch.rand(1)",
    "torch weights": "import torch; layer = torch.nn.Linear(1, 1)",
    "torch.manual_seed": "import torch; torch.manual_seed(1234)",
    "torch seed asked for": "import torch; SEED = torch.initial_seed()",
    "torch generator": "import torch; generator = torch.Generator(); generator.seed()",
    # -- the world: files, network, programs
    "file opened": "lines = open('/proc/self/status').read()",
    "file there": "import os; RESUME = os.path.exists('ckpt/latest')",
    "file there, by Path": "import pathlib; RESUME = pathlib.Path('ckpt/latest').is_file()",
    "link": "import os; LATEST = os.path.lexists('ckpt/latest')",
    "link read": "import os; LATEST = os.readlink('/proc/self/exe')",
    "files found": "import glob; SHARDS = sorted(glob.glob('*.bin'))",
    "files listed": "import pathlib; SHARDS = list(pathlib.Path('.').iterdir())",
    "files walked": "import os; SHARDS = list(os.walk('.'))",
    "configuration": "import pathlib; CONFIG = pathlib.Path(__file__).read_text()",
    "configuration of ini": "import configparser; parser = configparser.ConfigParser(); parser.read('/etc/none.ini')",
    "folder made": "import os; os.makedirs(os.path.join(os.environ['PLACE'], 'logs'), exist_ok=True)",
    "file removed": "import contextlib, os\nwith contextlib.suppress(OSError): os.remove('/nowhere/at/all')",
    "free space": "import shutil; FREE = shutil.disk_usage('/')",
    "room in the terminal": "import shutil; WIDTH = shutil.get_terminal_size().columns",
    "load": "import os; LOAD = os.getloadavg()",
    "cores": "import os; CORES = len(os.sched_getaffinity(0))",
    "temporary folder": "import tempfile; FOLDER = tempfile.mkdtemp()",
    "temporary directory": "import tempfile; folder = tempfile.TemporaryDirectory()",
    "temporary file": "import tempfile; file = tempfile.NamedTemporaryFile()",
    "temporary name": "import tempfile; NAME = tempfile.mktemp()",
    "port": "import socket\nwith socket.socket() as taken:\n    taken.bind(('127.0.0.1', 0))\n    PORT = taken.getsockname()[1]",
    "address": "import socket; ADDRESS = socket.gethostbyname('localhost')",
    "connection": "import socket\ntry: socket.create_connection(('127.0.0.1', 9), 1)\nexcept OSError: pass",
    "git": "import subprocess; COMMIT = subprocess.run(['git', '--version'], capture_output=True).stdout",
    "shell": "import os; COMMIT = os.popen('true').read()",
    "system": "import os; os.system('true')",
    "fork": "import os\nif os.fork() == 0: os._exit(0)\nos.wait()",
    "input": "import sys; LINE = sys.stdin.readline()",
    "terminal": "import sys; COLOURS = sys.stdout.isatty()",
    "library of C": "import ctypes; ctypes.CDLL(None).srand(7)",
    "variable of C": "import ctypes; ctypes.CDLL(None).setenv(b'A', b'1', 1)",
    # -- descriptors and memory
    "file handlers": """
        import logging, os
        log = logging.getLogger("kept")
        for name in ("first.log", "second.log"):
            log.addHandler(logging.FileHandler(os.path.join(os.environ["PLACE"], name)))
        def seen():
            log.warning(f"written by {os.getpid()}")
            return [open(handler.baseFilename).read().count(f"by {os.getpid()}") for handler in log.handlers]
    """,
    "file": "file = open('/dev/null', 'w'); file.write('half a line')",
    "pipe": "import os; ends = os.pipe()",
    "copy of stdout": "import os; kept = os.dup(1)",
    "stdout replaced": "import os; os.dup2(os.open('/dev/null', os.O_WRONLY), 1)",
    "stdin closed": "import os; os.close(0)",
    "socket": "import socket; listening = socket.create_server(('127.0.0.1', 0))",
    "selector": "import selectors; selector = selectors.DefaultSelector()",
    "event loop": "import asyncio; loop = asyncio.new_event_loop()",
    "database": "import os, sqlite3; database = sqlite3.connect(os.path.join(os.environ['PLACE'], 'database'))",
    "lock file": "import fcntl; held = open('/dev/null'); fcntl.flock(held, fcntl.LOCK_EX)",
    "memfd": "import os; memory = os.memfd_create('kept')",
    "eventfd": "import os; event = os.eventfd(0)",
    "pidfd": "import os; this = os.pidfd_open(os.getpid())",
    "inotify": "import ctypes; watching = ctypes.CDLL(None).inotify_init()",
    "shared mapping": "import mmap; memory = mmap.mmap(-1, 4096)",
    "shared memory": "from multiprocessing.shared_memory import SharedMemory\nmemory = SharedMemory(create=True, size=64)\nmemory.unlink()",
    "shared tensor": "import torch; tensor = torch.zeros(10).share_memory_()",
    "mapped array": "import numpy; array = numpy.memmap('/proc/self/exe', mode='r')",
    "lock": "import multiprocessing; lock = multiprocessing.Lock()",
    "spawn lock": "import multiprocessing; lock = multiprocessing.get_context('spawn').Lock()",
    "value": "import multiprocessing; value = multiprocessing.Value('i', 0)",
    "queue": "import multiprocessing; queue = multiprocessing.Queue()",
    # -- processes and threads
    "child": "import subprocess; child = subprocess.Popen(['sleep', '100'])",
    "process": "import multiprocessing, time; multiprocessing.Process(target=time.sleep, args=(100,), daemon=True).start()",
    "pool": "import multiprocessing; pool = multiprocessing.Pool(1)",
    "server process": "import multiprocessing; shared = multiprocessing.Manager().dict()",
    "process executor": "import concurrent.futures; executor = concurrent.futures.ProcessPoolExecutor(1); executor.submit(int)",
    "thread": "import threading, time; threading.Thread(target=time.sleep, args=(100,), daemon=True).start()",
    "thread that has ended": "import threading; thread = threading.Thread(target=int); thread.start(); thread.join()",
    "executor": "import concurrent.futures; executor = concurrent.futures.ThreadPoolExecutor(1); executor.submit(int).result()",
    "timer thread": "import threading; timer = threading.Timer(100, int); timer.daemon = True; timer.start()",
    "queue listener": "import logging.handlers, queue; logging.handlers.QueueListener(queue.Queue()).start()",
    "torch threads": "import torch; torch.set_num_threads(3)",
    "torch store": "import torch.distributed; store = torch.distributed.TCPStore('127.0.0.1', 0, 1, True)",
    "watchdog": "import faulthandler; faulthandler.dump_traceback_later(1000)",
    # -- signals and exits
    "signal handler": "import signal; signal.signal(signal.SIGUSR1, lambda number, frame: None)",
    "signal ignored": "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)",
    "signal blocked": "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])",
    "signal of C": "import faulthandler; faulthandler.enable()",
    "signal for stacks": "import faulthandler, signal; faulthandler.register(signal.SIGUSR1)",
    "interval timer": "import signal; signal.setitimer(signal.ITIMER_REAL, 1000)",
    "alarm": "import signal; signal.alarm(1000)",
    "fork handler": "import os; os.register_at_fork(after_in_child=int)",
    # -- settings of the process that the launcher would have, too, or that it restores
    "working directory": "import os; os.chdir('/')",
    "umask": "import os; os.umask(0o077)",
    "title": "from ctypes import pythonapi; pythonapi.prctl(15, b'named', 0, 0, 0)",
    "limit": "import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0))",
    "priority": "import os; os.nice(1)",
    "affinity": "import os; os.sched_setaffinity(0, {0})",
    "group of its own": "import os; os.setpgid(0, 0)",
    "sys.path": "import sys; sys.path.insert(0, '/added/at/import')",
    "collector frozen": "import gc; gc.freeze()",
    "profile": "import sys; sys.setprofile(lambda frame, event, argument: None)",
    "profiler": "import cProfile; profiler = cProfile.Profile(); profiler.enable()",
    # -- streams and hooks
    "written": "import os; os.write(1, b'written at import')",
    "stdout reconfigured": "import sys; sys.stdout.reconfigure(errors='ignore')",
    "stdout wrapped": "import sys, types; sys.stdout = types.SimpleNamespace(write=sys.stdout.write, flush=sys.stdout.flush)",
    "excepthook": "import sys; before = sys.excepthook; sys.excepthook = lambda *words: before(*words)",
    "error raised": "raise RuntimeError('at import')",
    "left": "import sys; sys.exit('not here')",
}

CLEAN = {
    "torch": "import numpy, torch, torch.distributed, torch.utils.data",
    "configuration": """
        from __future__ import annotations
        import argparse, collections, dataclasses, enum, functools, itertools, json, logging, math, os, pathlib, re, sys, typing
        ROOT, HERE = pathlib.Path(__file__).parent, os.path.dirname(os.path.abspath(__file__))
        RESOLVED, REAL = pathlib.Path(__file__).resolve().parent, os.path.realpath(__file__)
        HOME, CACHE, CWD = pathlib.Path.home(), os.path.expanduser("~/.cache"), os.getcwd()
        DEBUG, LEVEL = os.environ.get("DEBUG", "0") == "1", os.getenv("LOG_LEVEL")
        CORES, SYSTEM = os.cpu_count(), os.uname().sysname
        log = logging.getLogger(__name__)
        log.setLevel(logging.INFO)
        log.addHandler(logging.StreamHandler(sys.stderr))
        WORDS = re.compile(r"(\\w+)=(.*)")
        T = typing.TypeVar("T")
        class Kind(enum.Enum): A = enum.auto(); B = enum.auto()
        Pair = collections.namedtuple("Pair", "a b")
        class Typed(typing.NamedTuple): a: int = 1
        @dataclasses.dataclass(frozen=True)
        class Config:
            steps: int = 3
            kinds: dict[str, Kind] = dataclasses.field(default_factory=dict)
        parser = argparse.ArgumentParser()
        parser.add_argument("--steps", type=int, default=Config.steps)
        @functools.lru_cache
        def squared(n: int) -> int: return n * n
        TABLE = {n: squared(n) for n in range(100)}
    """,
    "platform": "import platform; SYSTEM, MACHINE = platform.system(), platform.machine()",
    "seeded": "import random, numpy; shuffle = random.Random(7); generator = numpy.random.default_rng(7)",
    "date": "import datetime; EPOCH, DAY = datetime.datetime(2020, 1, 1), datetime.timedelta(days=1)",
    "registry": """
        import abc, functools
        REGISTRY = {}
        def register(name):
            def put(found):
                REGISTRY[name] = found
                return functools.wraps(found)(lambda *words: found(*words))
            return put
        @register("first")
        def first(): pass
        class Base(abc.ABC):
            def __init_subclass__(cls): REGISTRY[cls.__name__] = cls
            @abc.abstractmethod
            def run(self): ...
        class Sub(Base):
            def run(self): pass
    """,
    "model": """
        import torch
        from torch import nn
        from torch.utils.data import DataLoader, Dataset
        import torch.nn.functional as F
        DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
        MASK = torch.tril(torch.ones(8, 8))
        DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(2, 2)
            def forward(self, x): return F.relu(self.layer(x))
        class Data(Dataset):
            def __len__(self): return 8
            def __getitem__(self, at): return torch.zeros(2)
        @torch.no_grad()
        def evaluate(model): return model(torch.zeros(2))
    """,
    "scripted": """
        import torch
        @torch.jit.script
        def doubled(x): return x * 2
    """,
    "compiled": """
        import torch
        @torch.compile
        def doubled(x): return x * 2
        @torch.compile(mode="reduce-overhead", dynamic=False)
        def tripled(x): return x * 3
    """,
    "operator": """
        import torch
        @torch.library.custom_op("clean::double", mutates_args=())
        def double(x: torch.Tensor) -> torch.Tensor: return x * 2
        @double.register_fake
        def _(x): return torch.empty_like(x)
        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x): return x
            @staticmethod
            def backward(ctx, grad): return grad
    """,
    "kernel": """
        import functools, inspect
        class Kernel:
            def __init__(self, function):
                functools.update_wrapper(self, function)
                self.source, self.lines = inspect.getsource(function), inspect.getsourcelines(function)
                self.file, self.signature = inspect.getsourcefile(function), inspect.signature(function)
        @Kernel
        def kernel(x): return x
    """,
    "installed": """
        import importlib.metadata, importlib.util
        VERSION, HAS_FLASH = importlib.metadata.version("torch"), importlib.util.find_spec("flash_attn") is not None
        try: import nothing_of_the_kind
        except ImportError: nothing_of_the_kind = None
    """,
}
"""What ordinary modules do at import. The watch finds nothing in them."""

PACKAGES = (
    *(
        "numpy",
        "numpy.random",
        "torch.distributed.fsdp",
        "torch.distributed.checkpoint",
        "torch.utils.data",
        "torch.optim",
    ),
    *("torch.profiler", "einops", "tqdm", "yaml", "omegaconf", "safetensors", "regex", "rich", "torchdata"),
    *("megatron.core", "mt_resilient"),
    *("torchvision", "tensorboard", "transformers", "accelerate", "lightning", "datasets", "pandas", "scipy"),
)
"""Packages that trainings import; of those that are installed."""
