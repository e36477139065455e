"""Who may import whom (docs/architecture.md draws it), and who may import what."""

import ast
import configparser
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOT_THE_PROGRAM = {"tests", "examples", "typings", "benchmarks", "scripts", "build", "docs"}
BELOW = {
    "": {"", "training", "agent", "dashboard", "formats", "simulator", "chaos", "checkpoint", "resilience"},
    "chaos": {"chaos", "training", "agent", "checkpoint", "resilience"},
    "training": {"training", "checkpoint", "resilience"},
    "agent": {"agent", "checkpoint", "resilience"},
    "dashboard": {"dashboard", "agent", "resilience"},
    "formats": {"formats", "checkpoint", "resilience"},
    "simulator": {"simulator", "agent", "checkpoint", "resilience"},
    "checkpoint": {"checkpoint", "resilience"},
    "resilience": {"resilience"},
}
"""Package → packages that its modules may import from; the root's own modules are the command line's and the package itself."""

ORDER = {
    "resilience": (
        "clock errors config model store store/etcd inprocess text membership ipc detect diagnose plan "
        "incidents decide report controller"
    ),
    "agent": (
        "config output launch ranks run_directory etcd monitor buddy preflight cli peers snapshots join policies "
        "node loop ssh shared_run run_choice bootstrap"
    ),
    "checkpoint": ("format arena backend buddy slabs durable"),
    "training": (
        "device device_check live_instances code_flow attach warm state/tensors state/values state/modules state/optimizers state data "
        "variables snapshot boundary loops session"
    ),
    "formats": (
        "safe_unpickle torch_zip dcp_reader dcp_names megatron_names dcp_export safetensors_files export "
        "import_checkpoint zarr_nodes zarr_store"
    ),
    "dashboard": ("contents prometheus local_prometheus report server"),
    "simulator": ("scenario engine results command"),
    "chaos": ("judgement rank settings live nemesis runs campaign command"),
}
"""Package → its rooms, and the modules of its root, each of which may import from those before it."""

SITES = {"training/site", "chaos/site"}
"""Folders that are no packages: Python imports their sitecustomize."""
ONLY_IN = {
    "tensorstore": {"checkpoint/slabs/zarr_slab.py", "checkpoint/backend/object_store.py"},
    "grpc": {
        "resilience/store/etcd/client.py",
        "resilience/store/etcd/keepalive.py",
        "resilience/store/etcd/member.py",
        "resilience/store/etcd/watch.py",
    },
    "prometheus_client": {"resilience/report/metrics.py", "resilience/report/incident_metrics.py"},
    "pymtml": {"agent/monitor/mthreads.py"},
    "pynvml": {"agent/monitor/nvidia.py"},
    "torch_musa": set(),
    "zarr": {"formats/zarr_store.py"},
    "starlette": {"dashboard/server.py"},
    "uvicorn": {"dashboard/server.py"},
    "pickle": {"formats/safe_unpickle.py"},
}
PURE_ROOMS = {
    "resilience/model",
    "resilience/inprocess",
    "resilience/membership",
    "resilience/detect",
    "resilience/diagnose",
    "resilience/plan",
    "resilience/incidents",
    "resilience/decide",
    "resilience/text",
    "checkpoint/format",
    "simulator/engine",
    "chaos/judgement",
}
"""All that is in them is pure."""
PURE = {
    "resilience/ipc/board_events.py",
    "resilience/report/alert_rules.py",
    "resilience/report/doubts.py",
    "resilience/report/explain.py",
    "resilience/report/overview.py",
    "resilience/report/panels.py",
    "resilience/report/status_view.py",
    "resilience/report/time_ledger.py",
    "resilience/store/keys.py",
    "resilience/store/parsed_cache.py",
    "resilience/store/write_rates.py",
    "agent/loop/next_action.py",
    "resilience/report/page_view.py",
    "agent/ssh/hostfile.py",
    "agent/preflight/rules.py",
    "agent/launch/scheduler_env.py",
    "checkpoint/durable/save_interval.py",
    "checkpoint/buddy/protocol.py",
    "checkpoint/arena/slot_header.py",
    "checkpoint/durable/retention.py",
    "checkpoint/arena/memory_ring.py",
    "checkpoint/buddy/admission.py",
    "formats/zarr_nodes.py",
    "simulator/results/plots.py",
}
"""Pure modules of other rooms."""
IMPURE = {
    "time",
    "datetime",
    "random",
    "os",
    "io",
    "pathlib",
    "socket",
    "select",
    "threading",
    "subprocess",
    "logging",
    "uuid",
}
SEEDED = {"simulator/engine/engine.py": {"random"}, "chaos/judgement/draw.py": {"random"}}
"""Chance that comes from a seed alone."""


@cache
def sources() -> list[str]:
    names = (path.relative_to(ROOT) for path in ROOT.rglob("*.py"))
    return sorted(
        str(name) for name in names if not name.parts[0].startswith(".") and name.parts[0] not in NOT_THE_PROGRAM
    )


def package_of(source: str) -> str:
    return source.partition("/")[0] if "/" in source else ""


def unit_of(source: str) -> str:
    """The room of a module; of a package's root the module itself."""
    room = source.rpartition("/")[0]
    return source.removesuffix(".py") if room == package_of(source) else room


def pure() -> list[str]:
    return sorted(PURE | {source for source in sources() if source.rpartition("/")[0] in PURE_ROOMS})


@cache
def imports(source: str, at_import_time: bool = False) -> tuple[tuple[int, str], ...]:
    return tuple(_imports(source, at_import_time))


def _imports(source: str, at_import_time: bool) -> Iterator[tuple[int, str]]:
    """(level, module) of each import; of `from x import y` both x and x.y. at_import_time: only of those that importing the module
    carries out."""
    todo: list[ast.AST] = [ast.parse((ROOT / source).read_text())]
    while todo:
        node = todo.pop()
        if at_import_time and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if at_import_time and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            todo += node.orelse
            continue
        if isinstance(node, ast.Import):
            yield from ((0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.module:
                yield node.level, node.module
            yield from ((node.level, ".".join(filter(None, (node.module, alias.name)))) for alias in node.names)
        todo += ast.iter_child_nodes(node)


def target(source: str, level: int, module: str) -> str | None:
    """The file of ours that is imported from, or a folder's `__init__.py`; None for somebody else's, and for what is within a module."""
    if level == 0:
        ours, _, rest = module.partition(".")
        if ours != "mt_resilient":
            return None
        parts = rest.split(".") if rest else []
    else:
        parts = [*source.split("/")[:-level], *module.split(".")]
    path = "/".join(parts)
    if (ROOT / f"{path}.py").is_file():
        return f"{path}.py"
    return f"{path}/__init__.py".lstrip("/") if (ROOT / path / "__init__.py").is_file() else None


@cache
def targets(source: str) -> frozenset[str]:
    return frozenset(found for level, module in imports(source) if (found := target(source, level, module)) is not None)


def test_there_is_something_to_look_at() -> None:
    found = sources()
    assert set(found) >= PURE
    assert {"cli.py", "__init__.py", "training/session.py", "agent/loop/supervisor.py"} <= set(found)
    assert {package_of(source) for source in found} == set(BELOW)
    job, loop = "agent/bootstrap.py", "agent/loop/executor.py"
    assert target(job, 2, "resilience.store.protocol") == "resilience/store/protocol.py"
    assert target(job, 1, "node") == "agent/node.py"
    assert target(job, 1, "node.Node") is None
    assert target(loop, 2, "node") == "agent/node.py"
    assert target(loop, 3, "resilience.store") == "resilience/store/__init__.py"
    assert target("cli.py", 1, "agent.bootstrap") == job
    assert (
        target("training/site/sitecustomize.py", 0, "mt_resilient.training.attach.import_hook")
        == "training/attach/import_hook.py"
    )
    assert target(job, 0, "json") is None
    assert unit_of(loop) == "agent/loop"
    assert unit_of(job) == "agent/bootstrap"
    assert unit_of("training/state/values/packing.py") == "training/state/values"


@pytest.mark.parametrize("source", sources())
def test_imports_point_down_only(source: str) -> None:
    wrong = {found for found in targets(source) if package_of(found) not in BELOW[package_of(source)]}
    assert wrong == set()


@pytest.mark.parametrize("package", ORDER)
def test_rooms_import_those_before_them(package: str) -> None:
    order = ORDER[package].split()
    units = {
        unit_of(source) for source in sources() if package_of(source) == package and not source.endswith("__init__.py")
    }
    assert sorted(unit.removeprefix(f"{package}/") for unit in units - SITES) == sorted(order)
    place = {f"{package}/{unit}": number for number, unit in enumerate(order)}
    climbing = {
        (source.removesuffix(".py"), found.removesuffix(".py"))
        for source in sources()
        if unit_of(source) in place
        for found in targets(source)
        if not found.endswith("__init__.py") and place.get(unit_of(found), -1) > place[unit_of(source)]
    }
    assert climbing == set()


def test_a_room_has_at_most_fourteen_modules() -> None:
    sizes = dict.fromkeys((source.rpartition("/")[0] for source in sources() if not source.endswith("__init__.py")), 0)
    for source in sources():
        if not source.endswith("__init__.py"):
            sizes[source.rpartition("/")[0]] += 1
    assert {room: size for room, size in sizes.items() if size > 14} == {}


def test_a_module_has_at_most_three_hundred_lines() -> None:
    lines = {source: len((ROOT / source).read_text().splitlines()) for source in sources()}
    assert {source: number for source, number in lines.items() if number > 300} == {}


def test_the_simulator_plays_with_what_is_pure() -> None:
    """It obeys a record as agents do, and takes snapshots as often, by the very functions."""
    found = {
        found
        for source in sources()
        if package_of(source) == "simulator"
        for found in targets(source)
        if package_of(found) in ("agent", "checkpoint") and not found.endswith("__init__.py")
    }
    assert found == {"agent/loop/next_action.py", "checkpoint/durable/save_interval.py"}


def third_party(source: str, at_import_time: bool = False) -> set[str]:
    return {module.partition(".")[0] for level, module in imports(source, at_import_time) if level == 0}


@pytest.mark.parametrize("library", ONLY_IN)
def test_one_module_knows_a_library(library: str) -> None:
    users = {source for source in sources() if library in third_party(source)}
    assert users <= ONLY_IN[library]
    assert users or not ONLY_IN[library]


def test_importing_torch_is_for_training_alone() -> None:
    users = {source for source in sources() if "torch" in third_party(source, at_import_time=True)}
    assert {package_of(source) for source in users - {"formats/dcp_export.py"}} == {"training"}
    inside_functions = {source for source in sources() if "torch" in third_party(source)} - users
    assert {package_of(source) for source in inside_functions} <= {"training", "checkpoint"}


@pytest.mark.parametrize("source", pure())
def test_judgement_touches_nothing(source: str) -> None:
    assert third_party(source) & IMPURE == SEEDED.get(source, set())
    assert "resilience/clock.py" not in targets(source)


def test_the_packages_that_are_installed_are_those_of_the_tree() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    listed = setup["options"]["packages"].split()
    tree = {
        ".".join(("mt_resilient", *source.split("/")[:-1])) for source in sources() if source.endswith("__init__.py")
    }
    assert sorted(listed) == sorted(tree)


def test_every_folder_of_modules_is_a_package() -> None:
    folders = {source.rpartition("/")[0] for source in sources()} - SITES
    assert {folder for folder in folders if f"{folder}/__init__.py".lstrip("/") not in sources()} == set()


def test_the_agent_starts_without_torch() -> None:
    program = """
import sys
for name in ("mt_resilient", "mt_resilient.cli", "mt_resilient.agent.bootstrap"):
    __import__(name)
    assert "torch" not in sys.modules, f"import {name} imports torch"
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
