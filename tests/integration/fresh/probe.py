"""Write down everything that a program can see of its own start; a script calls it first of all.

Nothing is looked at when this is imported: the warm process may have imported it.
"""

import json
import os
from types import ModuleType


def at_start(modules: dict[str, ModuleType]) -> dict[str, object]:
    """What only the first lines can see. modules: sys.modules behind the script's imports."""
    import atexit

    callbacks = atexit._ncallbacks()  # type: ignore[attr-defined]
    known = {name: getattr(module, "__spec__", None) for name, module in modules.items() if name != "__main__"}

    from fresh import kernel

    seen = kernel.observe()

    from fresh import interpreter

    return {"atexit_callbacks": callbacks, **seen, "modules": interpreter.specs(known)}


def write(file: str, seen: object) -> None:
    """`seen` → `file`, whole or not at all."""
    with open(file + ".new", "w") as out:
        json.dump(seen, out, indent=1, default=repr)
    os.rename(file + ".new", file)
