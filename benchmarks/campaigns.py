"""How many faults `mt-resilient chaos` injects before a promise is broken: campaigns of ordinary.py, several at a time.

    python benchmarks/campaigns.py OUT [--at-once 2] [--faults 25] [--seconds 3600] [--first SEED] [--places 1,2,1,3]

--places: the number of nodes of one campaign after the other, in turn; 3: two nodes that train and one that stands by. There are two
ranks in all. Each campaign runs in network and mount namespaces of its own, which takes root. Campaigns are started as long as there is
time for one more. What is not over after --seconds is ended, and does not count. Writes OUT/campaigns.txt (the page of each campaign) and
OUT/campaigns.md (a table).
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import measure
from measure import Result

HERE = Path(__file__).resolve().parent
SETUP = 'mount --make-rprivate / && mount -t tmpfs tmpfs /dev/shm && ip link set lo up && exec "$@"'
ENOUGH_S = 20.0
"""Seconds that a campaign needs for each fault."""
_TOLD = {"faults": r"(\d+) faults? struck", "starts": r"(\d+) starts? of the ranks", "again": r"(\d+) steps? computed"}


@dataclass
class Campaign:
    seed: int
    nodes: int
    place: Path
    process: subprocess.Popen[bytes]
    began_s: float
    code: int | None = None
    """Its exit code; None: it had no time to end."""
    took_s: float = 0.0

    @property
    def page(self) -> str:
        page = self.place / "campaign" / "result.txt"
        return page.read_text() if page.exists() else (self.place / "output").read_text(errors="replace")

    def told(self, what: str) -> int:
        """Return the sum of all numbers that the page has for one of `_TOLD`."""
        return sum(map(int, re.findall(_TOLD[what], self.page)))

    @property
    def row(self) -> str:
        outcome = {None: "cut", 0: "kept all promises", 1: "**broke a promise**"}.get(
            self.code, f"exit code {self.code}"
        )
        figures = (self.told("faults"), self.told("starts"), self.told("again"))
        return " | ".join(map(str, ("", self.seed, self.nodes, *figures, f"{self.took_s:.0f} s", outcome, ""))).strip()


def started(seed: int, nodes: int, faults: int) -> Campaign:
    place = Path(tempfile.mkdtemp(prefix=f"campaign-{seed}-"))
    chaos = [sys.executable, "-m", "mt_resilient", "chaos", "--seed", str(seed), "--faults", str(faults)]
    chaos += ["--dir", str(place / "campaign"), "--nodes", str(min(nodes, 2))]
    chaos += ["--spares", "1"] if nodes > 2 else []
    torchrun = ["torchrun", "--nproc-per-node", "2" if nodes == 1 else "1", str(HERE / "ordinary.py")]
    with (place / "output").open("wb") as output:
        process = subprocess.Popen(
            ["unshare", "-mn", "sh", "-c", SETUP, "sh", *chaos, "--", *torchrun],
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={"OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", **os.environ},
        )
    return Campaign(seed, nodes, place, process, time.monotonic())


def ended(campaign: Campaign, *, cut: bool) -> bool:
    """Return whether the campaign is over. cut: end it if it is not."""
    campaign.code = campaign.process.poll()
    if campaign.code is None and not cut:
        return False
    if campaign.code is None:
        campaign.process.send_signal(signal.SIGTERM)
        try:
            campaign.process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(campaign.process.pid, signal.SIGKILL)
    campaign.took_s = time.monotonic() - campaign.began_s
    return True


def main() -> int:
    parser = measure.arguments(__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--at-once", type=measure.count, default=2)
    parser.add_argument("--faults", type=measure.count, default=25)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--first", type=measure.count, default=1)
    parser.add_argument("--places", default="1,2,1,3")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    nodes = itertools.cycle(int(word) for word in options.places.split(","))
    seeds, until_s = itertools.count(options.first), time.monotonic() + options.seconds
    running: list[Campaign] = []
    over: list[Campaign] = []
    while True:
        left_s = until_s - time.monotonic()
        while len(running) < options.at_once and (left_s > ENOUGH_S * options.faults or not (over or running)):
            running.append(started(next(seeds), next(nodes), options.faults))
        if not running:
            break
        for each in [each for each in running if ended(each, cut=left_s < 0)]:
            running.remove(each)
            over.append(each)
            print(each.row, file=sys.stderr, flush=True)
            (options.out / "campaigns.txt").write_text("\n".join(f"=== {one.row}\n{one.page}\n" for one in over))
        time.sleep(0.5)
    head = "| seed | nodes | faults | starts of the ranks | steps computed again | took | |\n|---|---|---|---|---|---|---|\n"
    (options.out / "campaigns.md").write_text(head + "".join(f"{each.row}\n" for each in over))
    counted = [each for each in over if each.code is not None]
    faults = sum(each.told("faults") for each in counted if each.code == 0)
    broken = float(sum(each.code != 0 for each in counted))
    results = [
        Result("campaigns that broke a promise", broken, "campaigns", limit=0.0, target="none"),
        Result("faults", faults, "faults"),
    ]
    measure.report("campaigns", results)
    return 1 if broken or not counted else 0


if __name__ == "__main__":
    sys.exit(main())
