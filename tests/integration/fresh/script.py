"""A script that looks at itself.

`torch` beside its reports: at torch too. `two lives`: it trains afterwards, until it is killed.
"""

import sys

_AT_START = dict(sys.modules)

import fresh.probe  # noqa: E402

_SEEN = fresh.probe.at_start(_AT_START)

import multiprocessing  # noqa: E402
import os  # noqa: E402
import time  # noqa: E402

import fresh.interpreter  # noqa: E402

counted: int = 3


class Thing:
    number: int = 1

    def method(self) -> int:
        return self.number


def in_a_child(thing: Thing) -> None:
    """Leaves with 7 where it has found this script again, by the name that spawned children give it."""
    again = sys.modules["__mp_main__"]
    found = type(thing) is again.Thing and again.counted == 3 and again.__dict__ is globals()
    sys.exit(7 if found else 1)


def main() -> None:
    place, rank = sys.argv[1], os.environ["RANK"]
    life = 1 + os.path.exists(f"{place}/rank{rank}.life1")
    seen = _SEEN | fresh.interpreter.observe(globals())
    child = multiprocessing.get_context("spawn").Process(target=in_a_child, args=(Thing(),))
    child.start()
    child.join()
    seen["spawned"] = child.exitcode
    if os.path.exists(f"{place}/torch"):
        os.environ["OMP_NUM_THREADS"] = "2"  # is heard by whoever loads torch now
        seen["libraries"] = fresh.libraries.libraries()
        seen["drawn"] |= fresh.libraries.drawn_by_libraries()
    if os.path.exists(f"{place}/imports"):
        from fresh import imported

        seen["imported"] = imported.SEEN
    fresh.probe.write(f"{place}/rank{rank}.life{life}", seen)
    if os.path.exists(f"{place}/two lives") and life == 1:
        train(f"{place}/rank{rank}.ready")


def train(ready: str) -> None:
    """Steps, so that the warm process imports what this one has."""
    import torch

    from mt_resilient import Session

    torch.distributed.init_process_group("gloo")
    session = Session(model=torch.nn.Linear(1, 1))
    for step in session.steps(2000):
        session.report(loss=0.5)
        if step == 2:
            with open(ready, "w") as file:
                file.write(str(os.getpid()))
        time.sleep(0.02)


if __name__ == "__main__":
    main()
