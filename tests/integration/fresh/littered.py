"""What a script does whose imports leave things behind: its first life trains until it is killed, its second one tells of them."""

import os
import sys
from types import ModuleType

from fresh import probe
from fresh.training import train
from torch.utils.data import DataLoader, Dataset


class Squares(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 8

    def __getitem__(self, at: int) -> int:
        return at * at


def workers() -> list[int]:
    """Sums that processes of its own have computed, before there is a process group."""
    import multiprocessing

    found = []
    for _ in range(10):
        found.append(sum(int(batch.sum()) for batch in DataLoader(Squares(), batch_size=4, num_workers=2)))
        with multiprocessing.get_context("fork").Pool(2) as pool:
            found.append(sum(pool.map(Squares().__getitem__, range(8))))
    return found


def seen(module: ModuleType) -> object:
    try:
        return module.seen()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"


def main(prefix: str) -> None:
    """prefix: of the names of the modules to tell of. Arguments: the place to write to, and `trains` where the first life does."""
    place, trains = sys.argv[1:]
    mine = f"{place}/rank{os.environ['RANK']}"
    life = 1 + os.path.exists(f"{mine}.life1")
    if trains == "trains" and life == 1:
        probe.write(f"{mine}.life1", {})
        train(f"{place}/ready")
    found = {name: seen(module) for name, module in list(sys.modules.items()) if name.startswith(prefix)}
    probe.write(f"{mine}.life{life}", {**found, "workers": workers() if prefix == "litter_" else []})
