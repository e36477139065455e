"""Hooks into a project's functions if they have the expected shape. If the functions have another shape, the script runs without hooks."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from types import ModuleType
from typing import Any

from ..attach.attach import attach
from ..attach.unknown_loop import UnknownLoop, name_of, tell_unknown

MARK = "__mt_resilient__"
"""The name that is set in a function, module or namespace that is already wrapped."""


def hook_in(
    namespace: dict[str, Any],
    make: Callable[[], Any],
    tell: Callable[[str, BaseException], None] = tell_unknown,
) -> None:
    """Call `make`, which hooks into the loop whose functions are in `namespace`. If the loop has another shape than expected, call `tell`
    and do not change the loop."""
    try:
        make()
    except Exception as error:
        tell(name_of(namespace), error)


def needed(namespace: Mapping[str, Any], *names: str) -> None:
    """Raises UnknownLoop if one of these names is missing."""
    if missing := [name for name in names if namespace.get(name) is None]:
        raise UnknownLoop(f"it has no {missing[0]}")


def parameters(function: Callable[..., Any], *names: str) -> inspect.Signature:
    """Return the function's signature. Raises UnknownLoop if it has no parameters of these names."""
    signature = inspect.signature(function)
    if missing := [name for name in names if name not in signature.parameters]:
        raise UnknownLoop(f"its {getattr(function, '__name__', function)} has no parameter {missing[0]}")
    return signature


def disable_rerun() -> None:
    """Disable Megatron's rerun state machine, if there is one. In its other modes it exits with code 16 or 17 although the ranks can
    rewind."""
    rerun = sys.modules.get("megatron.core.rerun_state_machine")
    with suppress(AttributeError):
        rerun.get_rerun_state_machine().set_mode(rerun.RerunMode.DISABLED)  # type: ignore[union-attr]


def forget_attention_maxima(chunks: Iterable[Any]) -> None:
    """Forget the largest attention logits that forward passes before the restore have noted for Megatron's `--qk-clip`."""
    for chunk in chunks:
        for module in chunk.modules():
            if getattr(module, "current_max_attn_logits", None) is not None:
                module.current_max_attn_logits = None


def before_call(module: Any, name: str, act: Callable[[Callable[..., Any]], None]) -> bool:
    """Let each call of the module's function `name` call `act` first, with the original function. Calls from modules that have already
    imported the function also call `act` first. Return False if the function is already wrapped."""
    original = getattr(module, name)
    if hasattr(original, MARK):
        return False

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        act(original)
        return original(*args, **kwargs)

    setattr(wrapper, MARK, True)
    setattr(module, name, wrapper)
    replace_everywhere(original, wrapper)
    return True


def replace_everywhere(original: Any, wrapper: Any) -> None:
    """Put `wrapper` in place of `original` in all modules, also in those that imported it by name before this rank was forked. No attribute
    is read: this would execute a lazy module."""
    for module in [m for m in sys.modules.values() if issubclass(type(m), ModuleType)]:
        held = object.__getattribute__(module, "__dict__")
        for name in [name for name, value in list(held.items()) if value is original]:
            setattr(module, name, wrapper)


def expect_steps(expected: bool = True) -> None:
    """Tell the agent to expect steps from this rank, because functions of a known loop are running; or to expect none any more. What a
    Session has told (2 or 3) stays."""
    attached = attach(trains=False)
    if attached and attached.page.tells <= 1:
        attached.page.tells = int(expected)


def resumes() -> bool:
    """Whether this rank is to continue from a snapshot, so that its loop must not begin from elsewhere."""
    attached = attach(trains=False)
    return attached is not None and (attached.handoff.resume_step >= 0 or bool(attached.handoff.origin))
