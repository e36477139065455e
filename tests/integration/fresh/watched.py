"""watched.py PLACE FIRST NAME…: import FIRST here, and each other module in a child of its own, under the warm process's watch. What it
found is in PLACE/found."""

import importlib
import importlib.util
import json
import os
import signal
import sys
from pathlib import Path

from mt_resilient.training.warm.side_effects import Watch


def found(watch: Watch, name: str) -> str:
    watch.found()  # this child is a new process
    try:
        with watch.running():
            importlib.import_module(name)
    except BaseException as error:
        return f"raises {error!r}"
    return watch.found()


def main(place: str, first: str, *names: str) -> None:
    sys.path.insert(0, place)
    answers = os.open(f"{place}/found", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    watch = Watch({"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"}, terminal=True)
    watch.unset = {"SCALE"}
    with watch.running():
        importlib.import_module(first)
    os.write(answers, json.dumps([first, watch.found()]).encode() + b"\n")
    for name in names:
        if importlib.util.find_spec(name) is None:
            continue
        child = os.fork()
        if child == 0:
            os.setpgid(0, 0)
            os.write(answers, json.dumps([name, found(watch, name)]).encode() + b"\n")
            # The resource tracker, which would unlink its semaphores, dies with it.
            for line in Path("/proc/self/maps").read_text().splitlines():
                if "/dev/shm/sem." in line:
                    os.unlink(line.split()[-1])
            os.killpg(0, signal.SIGKILL)  # with whatever it has started
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
