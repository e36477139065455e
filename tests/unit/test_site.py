"""What an interpreter runs before the script: our sitecustomize."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from mt_resilient.agent.launch.torchrun import SITE


def test_a_warm_process_that_fails_never_goes_on_with_the_script(tmp_path: Path) -> None:
    """It is no rank: it would train as a world of its own, over the job's files."""
    script = tmp_path / "train.py"
    script.write_text("print('the script runs')")
    environment = {"PYTHONPATH": str(SITE), "MT_RESILIENT_WARM": "{}"}  # a plan without a channel
    done = subprocess.run([sys.executable, "-u", script], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert "KeyError: 'channel'" in done.stderr


def test_any_python_of_the_user_s_may_read_it() -> None:
    """Also one that is older than the ranks', as a tool's. An error in it would hide the user's own sitecustomize."""
    tree = ast.parse((Path(SITE) / "sitecustomize.py").read_text(), feature_version=(3, 7))
    for node in ast.walk(tree):
        assert not isinstance(node, ast.JoinedStr | ast.NamedExpr | ast.AnnAssign), ast.dump(node)
        assert not getattr(node, "annotation", None), ast.dump(node)
        assert not getattr(node, "returns", None), ast.dump(node)


@pytest.mark.parametrize("python", [None, "/no/such/python", "/etc/passwd"])
@pytest.mark.parametrize("old", [False, True])
def test_without_the_agent_s_python_a_torchrun_runs_as_without_us(
    python: str | None, old: bool, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('the user has one')")
    (tmp_path / "torchrun").write_text("print('torchrun runs')")
    wraps = {"MT_RESILIENT_WRAPS": b"[]".hex()}
    environ = {**wraps, "PYTHONPATH": f"{SITE}:{tmp_path}", **({"MT_RESILIENT_PYTHON": python} if python else {})}
    command = [sys.executable, tmp_path / "torchrun"]
    if old:  # a Python before 3.10 has no sys.orig_argv
        (tmp_path / "old").mkdir()
        text = (Path(SITE) / "sitecustomize.py").read_text()
        (tmp_path / "old" / "sitecustomize.py").write_text(f"import sys\ndel sys.orig_argv\n{text}")
        environ["PYTHONPATH"] = f"{tmp_path}/old:{tmp_path}"
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("the user has one\ntorchrun runs\n", "")


RANK = {"MT_RESILIENT_HANDOFF": "{}", "TORCHELASTIC_RUN_ID": "none", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}


@pytest.mark.parametrize(
    ("before", "said"),
    [
        (["setsid", "--wait"], 1),
        (["timeout", "60"], 0),
        (["env", *(f"{n}={v}" for n, v in RANK.items()), "setsid", "--fork", "--wait"], 0),
    ],
    ids=["a rank", "a child of a rank", "a child of a rank, in its own session"],
)
def test_only_a_rank_says_that_its_python_lacks_us(before: list[str], said: int, tmp_path: Path) -> None:
    """A rank's child processes may be any programs: what reads their stderr expects nothing of ours."""
    text = (Path(SITE) / "sitecustomize.py").read_text()
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules['mt_resilient'] = None\n{text}")
    command = [
        *before,
        "env",
        *(f"{name}={value}" for name, value in RANK.items()),
        sys.executable,
        "-c",
        "print('runs')",
    ]
    done = subprocess.run(
        command, env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"}, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr.count("cannot be attached")) == ("runs\n", said), done.stderr
    assert bool(done.stderr) == bool(said)


def test_a_child_of_a_rank_is_ready_for_a_loop_without_our_imports() -> None:
    """They take 0.1 s of each program in Python that a rank starts."""
    told = "import sys; print(type(sys.meta_path[0]).__name__, *[n for n in sys.modules if n.startswith('mt_resilient.resilience.')])"
    root = Path(SITE).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", told], env={**RANK, "PYTHONPATH": f"{SITE}:{root}"}, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("LoopFinder mt_resilient.resilience.clock\n", "")
