"""Which statements at the top of a script may run once, ahead of time, for all ranks."""

import ast
import sys
from pathlib import Path

import pytest

from mt_resilient.training.warm.script_preamble import opening
from mt_resilient.training.warm.side_effects import installed


def texts(source: str) -> tuple[list[str], int]:
    statements, behind = opening(ast.parse(source).body)
    return [ast.unparse(statement) for statement in statements], behind


@pytest.mark.parametrize(
    "statement",
    [
        "import os",
        "from . import part",
        "from torch import *",
        "os.environ['A'] = '1'",
        "os.environ.setdefault('A', '1')",
        "os.environ.pop('A', None)",
        "sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, 'x'))",
        "sys.path.append('..')",
        "try:\n    import fast\nexcept ImportError:\n    fast = None",
        "try:\n    import fast\nexcept ImportError:\n    import slow as fast",
    ],
)
def test_imports_and_what_they_depend_on_belong_to_the_opening(statement: str) -> None:
    assert texts(f"{statement}\nprint()") == ([statement], statement.count("\n") + 2)


@pytest.mark.parametrize(
    "statement",
    [
        '"""Trains."""',
        "from __future__ import annotations",
        "pass",
        "N: int",
        "N: int = 3",
        "sleep = time.sleep",
        "NAMES = ['a', ('b', 1.5)]",
        "if TYPE_CHECKING:\n    import other",
        "def f(a, b=1, *, c=None):\n    return torch.ones(a)",
        "async def f():\n    pass",
    ],
)
def test_statements_that_no_import_depends_on_are_skipped(statement: str) -> None:
    assert texts(f"{statement}\nimport a") == (["import a"], 0)


@pytest.mark.parametrize(
    "statement",
    [
        "print()",
        "torch.cuda.is_available = lambda: False",
        "torch.set_default_dtype(torch.float64)",
        "args = parse()",
        "N: int = count()",
        "os.environ['A'] = str(count())",
        "os.environ['A'] = other",
        "os.environ[name()] = '1'",
        "os.environ.update(A=f())",
        "environ['A'] = '1'",
        "sys.path.insert(0, find())",
        "warnings.filterwarnings('ignore')",
        "class A:\n    pass",
        "@wrap\ndef f():\n    pass",
        "def f(a=g()):\n    pass",
        "if __name__ == '__main__':\n    import b",
        "if TYPE_CHECKING:\n    import other\nelse:\n    import another",
        "for name in ['a']:\n    __import__(name)",
        "with warnings.catch_warnings():\n    import b",
        "try:\n    import b\nexcept ImportError:\n    install()",
        "try:\n    import b\nfinally:\n    import c",
        "del a",
        "a, b = 1, 2",
        "assert a",
        "exec('import b')",
    ],
)
def test_the_opening_ends_before_a_statement_that_may_change_imports(statement: str) -> None:
    assert texts(f"import a\n{statement}\nimport b") == (["import a"], 3 if statement.startswith("@") else 2)


def test_packages_that_pip_installed_with_target_are_not_the_script_s_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, packages = tmp_path / "own", tmp_path / "packages"
    (packages / "tqdm-4.70.1.dist-info").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(own), str(packages), *sys.path[1:]])
    assert installed(str(packages / "tqdm" / "std.py"))
    assert not installed(str(own / "train.py"))
