"""A module of the user's: what it sees while it is imported, as a configuration module does that reads arguments and environment."""

import os
import sys
import threading

from fresh import kernel

SEEN = {
    "environ": dict(os.environ),
    "argv": list(sys.argv),
    "paths": {"path": list(sys.path)},
    "main": getattr(sys.modules["__main__"], "__file__", None),
    "cwd": os.getcwd(),
    "of_this_process": threading.main_thread().native_id == os.getpid(),
    **kernel.observe(),
}
