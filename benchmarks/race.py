"""Measure the time from a fault to the first new step: ours beside torchrun, ft_launcher, torchft and dlrover-run, in one training.

    python benchmarks/race.py --install DIR [--wheels FOLDER]     make the peers' virtual environments
    python benchmarks/race.py --venvs DIR [--systems …] [--faults …] [--repeats N] [--device cuda] [--results FILE]
    python benchmarks/race.py --write docs/benchmarks.md          write the tables and the picture of what the files of --results hold

The training is `race/train.py`: a small GPT of megatron-core, two data-parallel ranks, gloo, or NCCL with `--device cuda`.
`race/systems.toml` says how each system is started, `race/systems.py` has its checkpoint code. A system's faults of a kind strike one job,
one after the other. A step is new if no rank has done it before. The final state is compared with that of a run without faults.

Predicted: a kill costs 0.3 s warm, 2.5 s under torchrun and more elsewhere; only ft_launcher is faster at a hang.
`--write` makes docs/benchmarks.md of the results. Those of `--device cuda` are a section of that page, and the rest of it stays.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import race_page
import race_table
from jobs import BESIDE, REPOSITORY, JobFailed, workplace
from measure import arguments, count, machine, report, say
from race_table import FAULTS, Outcome

from mt_resilient.agent.launch.ports import free_ports
from mt_resilient.chaos.live.cluster import Cluster
from mt_resilient.resilience.report.journal import Tail

HERE = Path(__file__).parent / "race"
SYSTEMS: dict[str, dict[str, Any]] = tomllib.loads((HERE / "systems.toml").read_text())
WARM_UP, AFTER = 40, 20
"""Steps before the first fault, and between the end of one recovery and the next fault."""
BACK_S = 5.0
"""Seconds after which a lost node's command is given again."""
WITHIN_S = {"kill": 120.0, "hang": 130.0, "nan": 120.0, "agent": 120.0, "node": 120.0}
"""A recovery that takes longer is not awaited."""


class Run:
    """A job of one system, on one node or two."""

    def __init__(self, name: str, nodes: int, place: Path, options: argparse.Namespace) -> None:
        system = SYSTEMS[name]
        self.groups = system.get("groups", False)
        self.place, self._nodes = place, 2 if self.groups else nodes
        self._form = system["node" if self._nodes == 2 else "one"]
        self._set = system.get("environment", {})
        place.mkdir()
        train = f"{HERE}/train.py {name} {place} --every {options.every} --step-delay {options.step_delay}"
        venv = options.venvs / system["package"] / "bin" if "install" in system else BESIDE
        port, *self._ports = free_ports(3)
        self._values: dict[str, Any] = {
            "bin": venv, "python": venv / "python", "run": place, "here": HERE, "every": options.every, "nodes": nodes,
            "port": port, "train": f"{train} --device {options.device}", "flags": flags(name, options.venvs),
        }  # fmt: skip
        ours = name.startswith("ours") and nodes == 2
        self._cluster = Cluster(place / "cluster", 2, namespaces=False) if ours else None
        self._tail, self.events = Tail(place / "events"), []
        for helper in system.get("before", []):
            self._spawn(helper, 0)
        self.agents = [self._spawn(self._form, node) for node in range(self._nodes)]

    def _spawn(self, form: str, node: int) -> subprocess.Popen[bytes]:
        values = self._values | {"node": node, "host": int(node == 0), "port_of_node": self._ports[node]}
        environment = {key: text for key, text in os.environ.items() if not key.startswith(("MT_RESILIENT_", "PET_"))}
        path = [str(REPOSITORY / "examples" / "gpt"), environment.get("PYTHONPATH", "")]
        environment |= {"OMP_NUM_THREADS": "1", "TMPDIR": str(self.place), "PYTHONPATH": os.pathsep.join(path)}
        environment |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        environment |= {key: text.format(**values) for key, text in self._set.items()}
        if self._cluster:
            own = self._cluster.names[node]
            values["cluster"] = shlex.join(self._cluster.options(self.place, own))
        with (self.place / "log").open("ab") as log:
            return subprocess.Popen(
                shlex.split(form.format(**values)), cwd=self.place, env=environment, stdin=subprocess.DEVNULL,
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def wait(self, condition: Callable[[], Any], within_s: float, what: str) -> Any:
        """Return the condition's first true value, or None when the time is up. Raises JobFailed if all agents have ended."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            self.events += self._tail.new()
            if found := condition():
                return found
            if all(agent.poll() is not None for agent in self.agents):
                raise JobFailed(f"{what}: the job ended with code {self.agents[0].returncode}: {self.why()}")
            time.sleep(0.02)
        return None

    def log(self) -> str:
        return (self.place / "log").read_text(errors="replace")

    def why(self) -> str:
        """Return the line of the log that may name the error."""
        lines = self.log().splitlines()
        errors = [line for line in lines if "Error" in line and "warn" not in line.lower()]
        return (errors or lines or ["it printed nothing"])[-1].strip()[-200:]

    def steps(self) -> list[tuple[float, int, int, int]]:
        return [(one["at_s"], one["rank"], one["step"], one["ranks"]) for one in self.events if "step" in one]

    def newest(self, ranks: int = 1) -> int:
        return max((step for _, _, step, took_part in self.steps() if took_part >= ranks), default=-1)

    def strike(self, fault: str) -> float:
        """Cause a fault of rank 1, or of its node. Return when it struck."""
        if fault == "nan":
            before = sum("fault" in one for one in self.events)
            (self.place / "order").write_text(fault)
            (self.place / "order").rename(self.place / "order-1")
            struck = self.wait(lambda: [one for one in self.events if "fault" in one][before:], 60.0, "the fault")
            if not struck:
                raise JobFailed("rank 1 did not take the order within 60 s")
            return struck[0]["at_s"]
        doomed = [self.agents[1]] if fault in ("agent", "node") else []
        pids = [agent.pid for agent in doomed]
        if fault == "node":
            pids += [child.pid for agent in doomed for child in psutil.Process(agent.pid).children(recursive=True)]
        if fault in ("kill", "hang"):
            pids = [[one["start"] for one in self.events if "start" in one and one["rank"] == 1][-1]]
        struck_s = time.monotonic()
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP if fault == "hang" else signal.SIGKILL)
        return struck_s

    def whole(self, fault: str, struck_s: float, top: int) -> bool:
        """Whether all ranks train again, and have done so for a while. top: the newest step before the fault."""
        if fault in ("agent", "node") and self.agents[1].poll() is not None and time.monotonic() > struck_s + BACK_S:
            self.agents[1] = self._spawn(self._form, 1)
        starts = [one["at_s"] for one in self.events if "start" in one and one["rank"] == 1 and one["at_s"] > struck_s]
        if fault != "nan" and not starts:
            return False
        since_s = max([*starts, struck_s])
        new = {step for at_s, _, step, took_part in self.steps() if at_s > since_s and took_part >= 2 and step > top}
        return len(new) >= AFTER

    def warm(self) -> bool:
        """Whether the warm process of each node is ready."""
        journals = [path.read_text() for path in self.place.glob("**/journal.jsonl")]
        return len(journals) == len(self.agents) and all("warm process is ready" in journal for journal in journals)

    def phases(self) -> dict[str, float]:
        """Return the medians of the phases in our incidents."""
        found: dict[str, dict[str, Any]] = {}
        for journal in self.place.glob("**/journal.jsonl"):
            for line in Tail(journal).new():
                if line["kind"] == "incident" and not line["incident"]["open"]:
                    found[line["incident"]["id"]] = line["incident"]["phases_s"]
        names = {name for one in found.values() for name in one}
        return {name: race_table.median([one[name] for one in found.values() if name in one]) or 0.0 for name in names}

    def digest_after(self, step: int) -> dict[str, Any] | None:
        found = self.wait(lambda: [one for one in self.events if one.get("after", -1) > step], 120.0, "the digest")
        return found and found[0]

    def stop(self) -> None:
        for agent in self.agents:
            if agent.poll() is None:
                agent.terminate()
        psutil.wait_procs([psutil.Process(agent.pid) for agent in self.agents if agent.poll() is None], timeout=30)
        if self._cluster:
            self._cluster.close()
        for child in psutil.Process().children(recursive=True):  # orphans are this process's children
            with suppress(psutil.NoSuchProcess):
                child.kill()


def race(
    name: str, fault: str, place: Path, options: argparse.Namespace, reference: Callable[[str, int], str]
) -> dict[str, Any]:
    """Return what `options.repeats` faults cost one system. reference: the digest of the state without faults, by kind and step."""
    found: list[Outcome] = []
    note, digest, equal = "", None, None
    try:
        run = Run(name, 2 if fault in ("agent", "node") else 1, place, options)
    except OSError as error:  # a program is missing
        return {"outcomes": [], "phases": {}, "equal": None, "note": str(error), "load": os.getloadavg()[0]}
    try:
        if not run.wait(lambda: run.newest(2) >= WARM_UP, options.start_within, "the start"):
            raise JobFailed(f"{WARM_UP} steps took more than {options.start_within:.0f} s: {run.why()}")
        if name == "ours-warm":
            run.wait(run.warm, 180.0, "the warm process")
        while len(found) < options.repeats and not note and time.monotonic() < options.end_s:
            run.wait(lambda: (run.newest() + 1 - len(found)) % options.every == 0, 60.0, "the moment")
            top, struck_s = run.newest(), run.strike(fault)
            try:
                if not run.wait(lambda s=struck_s, t=top: run.whole(fault, s, t), WITHIN_S[fault], "after the fault"):
                    note = f"not all ranks train again within {WITHIN_S[fault]:.0f} s"
                    say(run.log()[-1500:])
            except JobFailed as error:
                note = str(error)
            found.append(race_table.outcome(run.steps(), struck_s, 2))
            say(f"  {name}, {fault} {len(found)}: {found[-1]}; load {os.getloadavg()[0]:.1f}")
        note = note or ("" if found else "the time was up")
        digest = None if note else run.digest_after(run.newest())
    except (JobFailed, OSError) as error:
        note = str(error)
        say(run.log()[-1500:])
    finally:
        run.stop()
    if digest and (undisturbed := reference("torchft" if run.groups else "none", digest["after"])):
        equal = digest["digest"] == undisturbed
    elif digest:
        note = "the run without faults did not come as far, so the bits were not compared"
    outcomes = race_table.saved(found)
    return {"outcomes": outcomes, "phases": run.phases(), "equal": equal, "note": note, "load": os.getloadavg()[0]}


def without_faults(kind: str, until: int, place: Path, options: argparse.Namespace) -> dict[str, str]:
    """Return the digests of a run without faults, by step."""
    say(f"  {kind}: {until} steps without faults")
    run = Run(kind, 1, place, argparse.Namespace(**{**vars(options), "step_delay": 0.0}))
    try:
        run.wait(
            lambda: any(one.get("after", 0) >= until for one in run.events),
            options.start_within + 0.3 * until,
            "without faults",
        )
        return {str(one["after"]): one["digest"] for one in run.events if "digest" in one}
    finally:
        run.stop()


def installed(name: str, venvs: Path) -> str:
    """Return the version of a system's package."""
    package, own = SYSTEMS[name]["package"], "install" in SYSTEMS[name]
    places = [*(venvs / package).glob("lib/python*/site-packages")] if own else sys.path
    return next((one.version for one in metadata.distributions(name=package, path=[*map(str, places)])), "")


def flags(name: str, venvs: Path) -> str:
    """Return the flags that a system has in its installed version alone."""
    by_version: dict[str, str] = SYSTEMS[name].get("flags", {})
    return next((text for start, text in by_version.items() if installed(name, venvs).startswith(start)), "")


def install(venvs: Path, wheels: Path | None) -> None:
    """Make a virtual environment for each peer, over this environment's packages. wheels: a folder with all that is to be added to them."""
    for name, system in SYSTEMS.items():
        if "install" in system and not (place := venvs / system["package"]).exists():
            say(f"{name}: {place}")
            subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
            for packages in place.glob("lib/python*/site-packages"):
                (packages / "zz_base.pth").write_text(f"{BESIDE.parent / packages.relative_to(place)}\n")
            pip = [sys.executable, "-m", "pip", "--python", place / "bin" / "python", "install", "-q"]
            what = ["-c", REPOSITORY / "constraints.txt", *system["install"]]
            if wheels:
                what = ["--no-index", "--no-deps", *wheels.glob("*.whl")]
            subprocess.run([*pip, *what], check=True)


def devices() -> str:
    """Return the names of this machine's GPUs."""
    said = subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True)
    return ", ".join(said.stdout.split("\n")).strip(", ")


def read(files: list[Path]) -> dict[str, Any]:
    """Return the results in the files, the later ones over the earlier ones."""
    kept: dict[str, Any] = {"runs": {}, "reference": {}, "versions": {}}
    for file in files:
        with suppress(FileNotFoundError):
            one = json.loads(file.read_text())
            kept |= one | {name: kept[name] | one[name] for name in ("runs", "reference", "versions")}
    return kept


def main() -> None:
    parser = arguments(__doc__)
    names = [name for name in SYSTEMS if name != "none"]
    parser.add_argument("--systems", nargs="+", choices=names, default=names, metavar="SYSTEM", help=", ".join(names))
    parser.add_argument(
        "--faults", nargs="+", choices=FAULTS, default=[*FAULTS], metavar="FAULT", help=", ".join(FAULTS)
    )
    parser.add_argument("--repeats", type=count, default=5, help="faults of each kind (default: 5)")
    parser.add_argument("--every", type=count, default=5, help="steps between checkpoints (default: 5)")
    parser.add_argument("--step-delay", type=float, default=0.1, help="seconds of sleep in each step (default: 0.1)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--venvs", type=Path, default=Path("/tmp/race-venvs"), help="the peers' virtual environments")
    parser.add_argument("--install", type=Path, metavar="DIR", help="make them there, and end")
    parser.add_argument(
        "--wheels", type=Path, metavar="FOLDER", help="make them of all wheels in this folder, without an index"
    )
    parser.add_argument(
        "--start-within", type=float, default=240.0, metavar="SECONDS", help="a job must train by then (default: 240)"
    )
    parser.add_argument(
        "--end-after", type=float, default=math.inf, metavar="SECONDS", help="strike no more faults after that time"
    )
    parser.add_argument("--remark", default="", metavar="TEXT", help="how it was measured, for the page")
    parser.add_argument(
        "--results", type=Path, nargs="+", default=[Path("race.json")], metavar="FILE",
        help="what is measured is added to what these files hold, and saved in the first one",
    )  # fmt: skip
    parser.add_argument(
        "--write", type=Path, metavar="PAGE", help="write the page from the results, and measure nothing"
    )
    options = parser.parse_args()
    if options.install:
        install(options.install, options.wheels)
        return
    options.venvs, options.end_s = options.venvs.absolute(), time.monotonic() + options.end_after
    kept = read(options.results)
    if not options.write:
        asked = {name: getattr(options, name) for name in ("every", "step_delay", "device", "remark")}
        kept |= {"machine": machine() | {"devices": devices() if options.device == "cuda" else ""}, "settings": asked}
        measure(kept, options)
    found = race_table.results(kept["runs"], names, kept["settings"]["every"])
    if options.write:
        race_page.write(options.write, SYSTEMS, kept, found, back=BACK_S)
    report("race", found, **kept["versions"])


def measure(kept: dict[str, Any], options: argparse.Namespace) -> None:
    """Race, and save the results after each system and fault."""
    with workplace() as place:

        def reference(kind: str, step: int) -> str:
            digests = kept["reference"].setdefault(f"{kind} {options.device}", {})
            if str(step) not in digests:
                digests.update(without_faults(kind, step + 600, place / f"reference-{kind}-{step}", options))
            return digests.get(str(step), "")

        for fault in options.faults:
            for name in options.systems:
                late = time.monotonic() > options.end_s
                if late or (fault in ("agent", "node") and "node" not in SYSTEMS[name]):
                    continue
                kept["versions"][name] = installed(name, options.venvs)
                kept["runs"][f"{name} {fault}"] = race(name, fault, place / f"{name}-{fault}", options, reference)
                say(f"  {name}, {fault}: {kept['runs'][f'{name} {fault}'] | {'outcomes': '…'}}")
                options.results[0].write_text(json.dumps(kept, indent=1))


if __name__ == "__main__":
    main()
