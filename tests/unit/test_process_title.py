"""What is shown of a process, where C looks for it too."""

import subprocess
import sys

LOOKS_AT_ITS_END = """
import ctypes, os
from mt_resilient.resilience.ipc.process_title import show
os.environ["SHOWN"] = "1"
assert show(["a", "b c"], os.environ)
assert open("/proc/self/cmdline").read() == "a\\0b c\\0"
assert "SHOWN=1" in open("/proc/self/environ").read().split("\\0")
libc = ctypes.CDLL(None)
libc.__cxa_atexit(ctypes.cast(libc.tzset, ctypes.c_void_p), None, None)  # it asks for TZ, once Python is gone
"""


def test_the_environment_outlives_python() -> None:
    """Threads of libraries, and exit handlers of C, look at it still."""
    done = subprocess.run([sys.executable, "-c", LOOKS_AT_ITS_END], stderr=subprocess.PIPE, timeout=60)
    assert done.returncode == 0, done.stderr
