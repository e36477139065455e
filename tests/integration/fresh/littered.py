"""A script whose imports leave things behind: littered.py PLACE trains NAME….

Its first life trains until it is killed, its second one tells. With `plain` in place of `trains` each rank tells of another group of names.
"""

import importlib
import json
import os
import sys
import time


def seen(module: object) -> object:
    try:
        return module.seen()  # type: ignore[attr-defined]
    except BaseException as error:
        return f"{type(error).__name__}: {error}"


def train(ready: str) -> None:
    import torch

    from mt_resilient import Session

    torch.distributed.init_process_group("gloo")
    session = Session(model=torch.nn.Linear(1, 1))
    for step in session.steps(5000):
        session.report(loss=0.5)
        if step == 2:
            with open(ready + ".new", "w") as file:
                file.write(str(os.getpid()))
            os.rename(ready + ".new", ready)
        time.sleep(0.02)


def main() -> None:
    place, trains, *names = sys.argv[1:]
    mine = os.path.join(os.path.abspath(place), "rank" + os.environ["RANK"])
    if trains == "plain":  # each rank imports one group
        names = names[int(os.environ["RANK"])].split("+")
    life = 1 + os.path.exists(mine + ".life1")
    modules = {name: importlib.import_module(f"litter_{name}") for name in names}
    found = {name: seen(m) for name, m in modules.items()} if trains == "plain" or life == 2 else {}
    with open(f"{mine}.life{life}.new", "w") as file:
        json.dump(found, file)
    os.rename(f"{mine}.life{life}.new", f"{mine}.life{life}")
    if trains == "trains" and life == 1:
        train(mine + ".ready")


if __name__ == "__main__":
    main()
