"""torchrun's options, as its argparse reads them (torch 2.13): which there are, and what a command line and the environment say. No I/O."""

from __future__ import annotations

from collections.abc import Mapping

from ...resilience.errors import UsageError

OURS = {"nproc_per_node", "nnodes", "node_rank", "master_addr", "master_port", "max_restarts", "standalone"}
OURS |= {"rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf"}
OURS_AS_VARIABLES = {f"PET_{name.upper()}" for name in OURS}
"""Environment variables from which torchrun takes an option that the command line lacks."""
FLAGS = {"standalone", "m", "module", "no_python", "run_path", "virtual_local_rank"}
OF_LAUNCH = {"use_env"}
"""Further options of torch.distributed.launch."""
VALUED = {"nnodes", "nproc_per_node", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "max_restarts"}
VALUED |= {"monitor_interval", "start_method", "event_log_handler", "role", "log_dir", "r", "redirects", "t", "tee"}
VALUED |= {"local_ranks_filter", "duplicate_stdout_filters", "duplicate_stderr_filters", "node_rank", "master_addr"}
VALUED |= {"master_port", "local_addr", "logs_specs", "numa_binding", "signals_to_handle", "shutdown_timeout"}
"""torchrun's options that have a value, as of torch 2.13. torchrun treats `-` and `_` in a name alike."""
_WHOLE = ("node_rank", "master_port", "max_restarts")
_COUNTS = ("nnodes", "nproc_per_node")
"""The numeric options of the rendezvous. Those of _COUNTS have further forms, such as `2:4` and `gpu`."""


def told(name: str, options: Mapping[str, str], environ: Mapping[str, str]) -> str:
    """Return the value of an option, from the command line or its PET_… variable; empty: the option is not given."""
    return options.get(name, environ.get(f"PET_{name.upper()}", ""))


def checked(options: Mapping[str, str], environ: Mapping[str, str]) -> None:
    """Raise UsageError if torchrun refuses the value of a numeric option: an agent would train with a number that the user did not give."""
    for name in (*_WHOLE, *_COUNTS):
        if name not in options and f"PET_{name.upper()}" not in environ:
            continue
        value = told(name, options, environ).strip()
        if not value or (name in _WHOLE and not value.lstrip("+-").isdecimal()):
            raise UsageError(
                f"--{name.replace('_', '-')} is {value!r}, which is no number; nothing was started. Perhaps a variable in the command is "
                "empty"
            )


def said(flag: str, options: Mapping[str, str], environ: Mapping[str, str]) -> bool:
    """Return whether a flag is set, as torchrun reads it: on the command line, or in its PET_… variable."""
    value = environ.get(f"PET_{flag.upper()}", "")
    return flag in options or (value.isdecimal() and int(value) > 0)


def parsed(rest: list[str], further: set[str]) -> tuple[dict[str, str], list[str], list[str]]:
    """Return the options by name, the options to pass on to torchrun as they were written, and the script with its arguments. further:
    further flags to accept."""
    values: dict[str, str] = {}
    kept: list[str] = []
    position = 0
    while position < len(rest) and rest[position].startswith("-"):
        word = rest[position]
        position += 1
        if word == "--":
            kept.append(word)
            return values, kept, rest[position:]
        name, equals, value = _option(word, further)
        taken = [word]
        if name in VALUED and not equals:
            if position >= len(rest):
                raise UsageError(f"torchrun's option {word} needs a value")
            value = rest[position]
            taken.append(value)
            position += 1
        values[name] = value
        if name not in OURS | OF_LAUNCH:
            kept += taken
    script = rest[position:]
    if script[1:2] == ["--"]:  # argparse drops these dashes, and no second ones
        return values, [*kept, "--"], [script[0], *script[2:]]
    return values, kept, script


def _option(word: str, further: set[str]) -> tuple[str, bool, str]:
    """Return the option's name, whether its value is in the same word, and that value. Like Python's argparse, accept `-t3`, and an
    unambiguous prefix of a name."""
    if word[1:2] in ("r", "t") and len(word) > 2:
        return word[1], True, word[2:].removeprefix("=")
    raw, equals, value = word.partition("=")
    name = raw.lstrip("-").replace("-", "_")
    known = VALUED | FLAGS | further
    begun = [whole for whole in known if raw.startswith("--") and whole.startswith(name)]
    if name not in known and len(begun) == 1:
        name = begun[0]
    if name not in known:
        raise UsageError(
            f"{word} is no option of torchrun that is known here; options of the script come after its name"
        )
    return name, bool(equals), value
