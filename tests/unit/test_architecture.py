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
    "": {"", "training", "agent", "formats", "simulator", "checkpoint", "resilience"},
    "training": {"training", "checkpoint", "resilience"},
    "agent": {"agent", "checkpoint", "resilience"},
    "formats": {"formats", "checkpoint", "resilience"},
    "simulator": {"simulator", "agent", "checkpoint", "resilience"},
    "checkpoint": {"checkpoint", "resilience"},
    "resilience": {"resilience"},
}
"""Package → packages that its modules may import from; the root's own modules are the command line's and the package itself."""

ONLY_IN = {
    "tensorstore": {"checkpoint/slabs.py", "checkpoint/objects.py"},
    "grpc": {
        "resilience/etcd.py",
        "resilience/etcd_keepalive.py",
        "resilience/etcd_member.py",
        "resilience/etcd_watch.py",
    },
    "prometheus_client": {"resilience/metrics.py"},
    "torch_musa": set(),
    "zarr": {"formats/zarr_store.py"},
    "pickle": {"formats/pickles.py"},
}
PURE = {
    "resilience/terms.py",
    "resilience/findings.py",
    "resilience/reports.py",
    "resilience/wishes.py",
    "resilience/machine.py",
    "resilience/noted.py",
    "resilience/orders.py",
    "resilience/incident.py",
    "resilience/kept.py",
    "resilience/events.py",
    "resilience/generations.py",
    "resilience/going_back.py",
    "resilience/moving.py",
    "resilience/requests.py",
    "resilience/keys.py",
    "resilience/world.py",
    "resilience/values.py",
    "resilience/scale.py",
    "resilience/detectors.py",
    "resilience/verdict.py",
    "resilience/stability.py",
    "resilience/across.py",
    "resilience/copies.py",
    "resilience/buddies.py",
    "resilience/recovery.py",
    "resilience/lives.py",
    "resilience/boundary.py",
    "resilience/chronicle.py",
    "resilience/conditions.py",
    "resilience/rewinds.py",
    "resilience/turnover.py",
    "resilience/decision.py",
    "resilience/describe.py",
    "resilience/glance.py",
    "resilience/roles.py",
    "resilience/phrases.py",
    "resilience/story.py",
    "resilience/hang.py",
    "resilience/health.py",
    "resilience/observing.py",
    "resilience/shortage.py",
    "resilience/stacks.py",
    "resilience/rescue.py",
    "resilience/usual.py",
    "resilience/weighing.py",
    "resilience/straggler.py",
    "agent/duty.py",
    "agent/hosts.py",
    "agent/preflight.py",
    "agent/scheduler.py",
    "checkpoint/agreement.py",
    "checkpoint/cadence.py",
    "checkpoint/frames.py",
    "checkpoint/header.py",
    "checkpoint/retention.py",
    "checkpoint/ring.py",
    "checkpoint/tiers.py",
    "formats/zarr_nodes.py",
    "simulator/progress.py",
    "simulator/training.py",
    "simulator/cluster.py",
    "simulator/books.py",
    "simulator/figures.py",
    "simulator/obeying.py",
    "simulator/strikes.py",
    "simulator/outcome.py",
    "simulator/formula.py",
    "simulator/plots.py",
}
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


def sources() -> list[str]:
    names = (path.relative_to(ROOT) for pattern in ("*.py", "*/*.py", "*/*/*.py") for path in ROOT.glob(pattern))
    return sorted(
        str(name) for name in names if not name.parts[0].startswith(".") and name.parts[0] not in NOT_THE_PROGRAM
    )


def package_of(source: str) -> str:
    return source.rpartition("/")[0].partition("/")[0]


@cache
def imports(source: str, at_import_time: bool = False) -> tuple[tuple[int, str], ...]:
    return tuple(_imports(source, at_import_time))


def _imports(source: str, at_import_time: bool) -> Iterator[tuple[int, str]]:
    """(level, module) of each import; at_import_time: only of those that importing the module carries out."""
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
        elif isinstance(node, ast.ImportFrom) and node.level and not node.module:
            yield from ((node.level, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.level, node.module or ""
        todo += ast.iter_child_nodes(node)


def target(source: str, level: int, module: str) -> str | None:
    """The package of ours that is imported from; None for somebody else's."""
    if level == 0:
        ours, _, rest = module.partition(".")
        return rest.partition(".")[0] if ours == "mt_resilient" else None
    if level == 1:
        here = package_of(source)
        return here or (module.partition(".")[0] if (ROOT / module.partition(".")[0]).is_dir() else "")
    return module.partition(".")[0]


def test_there_is_something_to_look_at() -> None:
    found = sources()
    assert set(found) >= PURE
    assert {"cli.py", "__init__.py", "training/session.py", "agent/supervisor.py"} <= set(found)
    assert {package_of(source) for source in found} == set(BELOW)
    assert target("agent/job.py", 2, "resilience.store") == "resilience"
    assert target("agent/job.py", 1, "node") == "agent"
    assert target("cli.py", 1, "agent.job") == "agent"
    assert target("training/site/sitecustomize.py", 0, "mt_resilient.training.hook") == "training"
    assert target("agent/job.py", 0, "json") is None


@pytest.mark.parametrize("source", sources())
def test_imports_point_down_only(source: str) -> None:
    package = package_of(source)
    wrong = [
        module
        for level, module in imports(source)
        if (found := target(source, level, module)) is not None and found not in BELOW[package]
    ]
    assert wrong == []


def test_the_simulator_plays_with_what_is_pure() -> None:
    """It obeys a record as agents do, and takes snapshots as often, by the very functions."""
    found = {
        (where, module)
        for source in sources()
        if package_of(source) == "simulator"
        for level, module in imports(source)
        if (where := target(source, level, module)) in ("agent", "checkpoint")
    }
    assert found == {("agent", "agent.duty"), ("checkpoint", "checkpoint.cadence")}


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


@pytest.mark.parametrize("source", sorted(PURE))
def test_judgement_touches_nothing(source: str) -> None:
    assert not third_party(source) & IMPURE
    assert "clock" not in {module.rpartition(".")[2] for _, module in imports(source)}


def test_the_packages_that_are_installed_are_those_of_the_tree() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    listed = set(setup["options"]["packages"].split())
    tree = {
        ".".join(("mt_resilient", *path.parent.relative_to(ROOT).parts))
        for pattern in ("__init__.py", "*/__init__.py", "*/*/__init__.py")
        for path in ROOT.glob(pattern)
        if (
            path.relative_to(ROOT).parts[0] not in NOT_THE_PROGRAM
            and not path.relative_to(ROOT).parts[0].startswith(".")
        )
    }
    assert listed == tree


def test_the_agent_starts_without_torch() -> None:
    program = """
import sys
for name in ("mt_resilient", "mt_resilient.cli", "mt_resilient.agent.job"):
    __import__(name)
    assert "torch" not in sys.modules, f"import {name} imports torch"
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
