"""A script that looks at itself. Its opening loads torch: a forked rank finds it loaded.

`two lives` beside its reports: its first life trains, until it is killed. The last one tells what a spawned child has found.
"""

import multiprocessing
import os
import sys

os.environ["OMP_NUM_THREADS"] = "2"  # is heard by the library that torch loads

import fresh.probe
from fresh.training import train

counted: int = 3
_SEEN = fresh.probe.at_start(dict(sys.modules))


class Thing:
    number: int = 1

    def method(self) -> int:
        return self.number


def in_a_child(thing: Thing) -> None:
    """Leaves with 7 where it has found this script again, by the name that spawned children give it."""
    again = sys.modules["__mp_main__"]
    sys.exit(7 if type(thing) is again.Thing and again.counted == 3 else 1)


def spawned() -> int | None:
    child = multiprocessing.get_context("spawn").Process(target=in_a_child, args=(Thing(),))
    child.start()
    child.join()
    return child.exitcode


def main() -> None:
    import fresh.interpreter

    place, rank = sys.argv[1], os.environ["RANK"]
    life = 1 + os.path.exists(f"{place}/rank{rank}.life1")
    trains = life == 1 and os.path.exists(f"{place}/two lives")
    seen = _SEEN | fresh.interpreter.observe(globals())
    if "torch" in sys.modules:
        seen["libraries"] = fresh.libraries.libraries()
        seen["drawn"] |= fresh.libraries.drawn_by_libraries()
    from fresh import imported

    seen["imported"] = imported.SEEN
    seen["spawned"] = 7 if trains else spawned()
    fresh.probe.write(f"{place}/rank{rank}.life{life}", seen)
    if trains:
        train(f"{place}/ready")


if __name__ == "__main__":
    main()
