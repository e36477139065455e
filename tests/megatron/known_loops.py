"""Which versions of Megatron-LM and Megatron-Bridge have a loop that the hooks know: asks the hooks themselves, and prints a table.

    python -m mt_resilient.tests.megatron.known_loops PACKAGES [CHECKOUT …]

Nothing of these versions is imported, because they need other packages and other Pythons. Their modules are made of the functions in their
sources, which are compiled and never called. PACKAGES: the directory into which pip's downloads are put.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from mt_resilient.training.attach.unknown_loop import UnknownLoop
from mt_resilient.training.boundary.local_gradients import CHECKS
from mt_resilient.training.loops.base import CALCULATOR
from mt_resilient.training.loops.megatron import BOUNDARY
from mt_resilient.training.loops.megatron_bridge import BridgeLoop
from mt_resilient.training.loops.megatron_entry import loop_of
from mt_resilient.training.loops.megatron_inline import InlineLoop

CORE = ("0.10.0", "0.11.0", "0.12.3", "0.16.1", "0.17.1", "0.18.2", "0.19.2")
BRIDGE = ("0.3.1", "0.4.2", "0.5.1", "0.6.2")
_HEAD = ["loop", "from", "known", "the boundary is at", "names the rank of a NaN by"]


def functions(tree: Path, module: str, made: dict[str, ModuleType]) -> ModuleType:
    """Return a module with the functions that the source of `module` defines, and with those that it imports from other modules of `tree`.
    Other imported names are placeholders."""
    if module in made:
        return made[module]
    made[module] = found = ModuleType(module)
    path = tree / f"{module.replace('.', '/')}.py"
    body = ast.parse(path.read_text()).body
    for node in (each for part in body for each in ast.walk(part) if isinstance(each, ast.Import | ast.ImportFrom)):
        of = node.module if isinstance(node, ast.ImportFrom) and not node.level else None
        for alias in node.names:
            there = of and of.startswith("megatron.bridge.training.") and (tree / f"{of.replace('.', '/')}.py").exists()
            value = vars(functions(tree, of, made)).get(alias.name, object()) if of and there else object()
            setattr(found, alias.asname or alias.name, value)
    for node in (each for each in body if isinstance(each, ast.FunctionDef)):
        node.decorator_list = []
        node.args.defaults = [ast.Constant(None) for _ in node.args.defaults]
        node.args.kw_defaults = [default and ast.Constant(None) for default in node.args.kw_defaults]
        for argument in ast.walk(node.args):
            if isinstance(argument, ast.arg):
                argument.annotation = None
        node.returns = None
        exec(compile(ast.fix_missing_locations(ast.Module([node], [])), str(path), "exec"), vars(found))
    return found


def known(tree: Path, bridge: bool = False) -> list[str]:
    """Return whether the hooks know the loop in this tree, where they find its boundary, and what shows the rank of a NaN."""
    made: dict[str, ModuleType] = {}
    try:
        if bridge:
            BridgeLoop(functions(tree, "megatron.bridge.training.pretrain", made))
            return ["yes", f"`{BOUNDARY}`", "(as its megatron-core)"]
        sys.modules[CALCULATOR] = functions(tree, CALCULATOR, made)
        loop = loop_of(vars(functions(tree, "megatron.training.training", made)))
    except (UnknownLoop, OSError) as error:
        return [f"no: {error}", "", ""]
    finally:
        sys.modules.pop(CALCULATOR, None)
    buckets = (tree / "megatron/core/distributed/param_and_grad_buffer.py").read_text()
    check = next((f"`{name}`" for name in CHECKS if f"def {name}(" in buckets), "nothing")
    return ["yes", "`training_log`" if isinstance(loop, InlineLoop) else f"`{BOUNDARY}`", check]


def version(tree: Path) -> str:
    text = (tree / "megatron/core/package_info.py").read_text()
    return ".".join(re.findall(r"^(?:MAJOR|MINOR|PATCH) = (\d+)", text, re.MULTILINE))


def download(place: Path, project: str, number: str, *options: str) -> Path:
    """Return the directory with the unpacked package."""
    name = f"{project.replace('-', '_')}-{number}"
    tree = place / name
    if not tree.exists():
        if not [*place.glob(f"{name}[-.]*")]:
            words = [
                "-m", "pip", "download", "-q", "--no-deps", "--ignore-requires-python", *options, f"{project}=={number}", "-d", str(place)
            ]  # fmt: skip
            subprocess.run([sys.executable, *words], check=True)
        (archive,) = place.glob(f"{name}[-.]*")
        if archive.suffix == ".whl":
            zipfile.ZipFile(archive).extractall(tree)
        else:
            with tarfile.open(archive) as packed:
                packed.extractall(place, filter="data")
    return tree


def rows(place: Path, checkouts: list[Path]) -> Iterator[list[str]]:
    for tree in checkouts:
        yield [f"Megatron-LM {version(tree)}", "a checkout", *known(tree)]
    for number in CORE:
        tree = download(place, "megatron-core", number, "--no-binary", "megatron-core")
        holds = (tree / "megatron/training/training.py").exists()
        yield [f"megatron-core {number}", "sdist", *(known(tree) if holds else ["it holds no training loop", "", ""])]
    for number in BRIDGE:
        yield [f"Megatron-Bridge {number}", "wheel", *known(download(place, "megatron-bridge", number), bridge=True)]


def table(lines: Iterator[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (_HEAD, ["---"] * len(_HEAD), *lines))


def main(place: str, *checkouts: str) -> None:
    named = [*checkouts, *filter(None, [os.environ.get("MEGATRON_LM")])]
    print(table(rows(Path(place), [Path(each) for each in dict.fromkeys(named)])))


if __name__ == "__main__":
    main(*sys.argv[1:])
