"""Loads the configuration into policies: frozen dataclasses, each in the module that uses it. An environment variable overrides the file,
and a flag overrides both.

Each section of the file is a policy, and each key is a field of it: `[snapshots] durable_every_steps = 100`. The same key is
`MT_RESILIENT_SNAPSHOTS_DURABLE_EVERY_STEPS` in the environment, and `--set snapshots.durable_every_steps=100` on the command line.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
import re
import tomllib
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .errors import UsageError

PREFIX = "MT_RESILIENT_"
_SECRET = ("on_incident",)
"""Keys whose values may contain a password, such as the address of a webhook."""
_OF_A_SERVICE = re.compile(r".*_(SERVICE_(HOST|PORT)|PORT_\d+_(TCP|UDP|SCTP))(_\w+)?=.*|.*_PORT=\w+://.*", re.ASCII)
"""Matches environment variables that Kubernetes sets in every container for a Service, such as one named `mt-resilient-agent`."""


def changed(policies: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are not the defaults, by `section.key`."""
    return {
        f"{section}.{f.name}": "(set)" if f.name in _SECRET else getattr(policy, f.name)
        for section, policy in policies.items()
        for f in dataclasses.fields(policy)
        if getattr(policy, f.name) != f.default
    }


def load(
    sections: Mapping[str, type], file: Path | None, environ: Mapping[str, str], flags: Mapping[str, str]
) -> dict[str, Any]:
    """Return one policy per section.

    flags: each value as text, by `section.key`. Raises UsageError, which names the bad key, where it was found, and the most similar known
    key.
    """
    values: dict[str, dict[str, Any]] = {name: {} for name in sections}
    if file:
        for section, table in _read(file).items():
            _known(section, sections, f"section [{section}] in {file}")
            if not isinstance(table, dict):
                raise UsageError(f"{file}: {section} must be a section, written [{section}]")
            for key, value in table.items():
                values[section][_key(sections[section], key, f"key {section}.{key} in {file}")] = value
    keys = {
        f"{PREFIX}{name}_{f.name}".upper(): (name, f.name)
        for name, p in sections.items()
        for f in dataclasses.fields(p)
    }
    ours = tuple(f"{PREFIX}{name}_".upper() for name in sections)
    for variable, text in environ.items():
        if variable.startswith(ours) and not _OF_A_SERVICE.fullmatch(f"{variable}={text}"):
            _known(variable, keys, variable)
            section, key = keys[variable]
            values[section][key] = text
    for dotted, text in flags.items():
        section, _, key = dotted.partition(".")
        _known(section, sections, f"--set {dotted}")
        values[section][_key(sections[section], key, f"--set {dotted}")] = text
    return {name: _policy(policy, name, values[name]) for name, policy in sections.items()}


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read the configuration {file}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} is not TOML: {error}") from error


def _known(word: str, words: Mapping[str, Any] | Sequence[str], where: str) -> None:
    if word not in words:
        near = difflib.get_close_matches(word, list(words), n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(words)}"
        raise UsageError(f"{where}: there is no such name; {hint}")


def _key(policy: type, key: str, where: str) -> str:
    _known(key, [f.name for f in dataclasses.fields(policy)], where)
    return key


def _policy(policy: type, section: str, values: Mapping[str, Any]) -> Any:
    hints = typing.get_type_hints(policy)
    return policy(**{key: typed(hints[key], value, f"{section}.{key}") for key, value in values.items()})


def typed(hint: Any, value: Any, where: str) -> Any:
    """Return `value` converted to the field's type. A text from the environment or the command line is parsed: `yes` becomes True."""
    if (
        hint is bool
        and isinstance(value, str)
        and value.lower() in ("true", "false", "1", "0", "yes", "no", "on", "off")
    ):
        return value.lower() in ("true", "1", "yes", "on")
    if (
        hint is str and isinstance(value, (str, int)) and not isinstance(value, bool)
    ):  # `number = 4` in the file means "4"
        return str(value)
    try:
        if hint in (int, float) and not isinstance(value, bool) and (isinstance(value, (str, int)) or hint is float):
            number = hint(value)
            if math.isfinite(number):
                return number
    except (TypeError, ValueError, OverflowError):
        pass
    if hint is bool and isinstance(value, bool):
        return value
    raise UsageError(f"{where} is {value!r}; it must be {_NAMES.get(hint, str(hint))}")


_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def overview(sections: Mapping[str, type]) -> str:
    """Return one line for each section, in the sequence of `sections`: its name, and the first sentence about it."""
    wide = max(map(len, sections))
    return "".join(
        f"  {name:<{wide}}  {user_part(policy.__doc__ or '').partition('. ')[0].rstrip('.')}\n"
        for name, policy in sections.items()
    )


def user_part(docstring: str) -> str:
    """Return the first paragraph of `docstring` as one line."""
    return " ".join(inspect.cleandoc(docstring).partition("\n\n")[0].split())
