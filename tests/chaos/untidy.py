"""Leaves much behind: shared memory, semaphores, tensors shared by file, children that nobody waits for. Its second life tells what of the
first one's is still there.

`untidy.py MADE LEFT`: the names in /dev/shm that the first life has made are in the file MADE, what the second finds of them in LEFT.
"""

import json
import multiprocessing
import os
import subprocess
import sys
import time
from multiprocessing import shared_memory
from pathlib import Path

import torch
import torch.multiprocessing


def main() -> None:
    made, left = map(Path, sys.argv[1:])
    if made.exists():
        names = json.loads(made.read_text())
        for _ in range(400):  # torch's manager takes 2 s
            there = [name for name in names if os.path.exists(f"/dev/shm/{name}")]
            if not there:
                break
            time.sleep(0.02)
        left.write_text(json.dumps(there))
        return
    segment = shared_memory.SharedMemory(create=True, size=1 << 20)
    lock = multiprocessing.get_context("spawn").Lock()
    torch.multiprocessing.set_sharing_strategy("file_system")
    tensor = torch.zeros(1000).share_memory_()
    names = [segment.name, f"sem.{lock._semlock.name[1:]}"]
    names += [name for name in os.listdir("/dev/shm") if name.startswith(f"torch_{os.getpid()}_")]
    for _ in range(30):
        subprocess.run("sleep 0 &", shell=True)
        time.sleep(0.02)
    made.with_suffix(".part").write_text(json.dumps(names))
    made.with_suffix(".part").rename(made)
    time.sleep(60)
    del tensor


if __name__ == "__main__":
    main()
