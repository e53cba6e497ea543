# SPDX-License-Identifier: Apache-2.0
"""Reads the few of vLLM's arguments that ``tidal serve`` must know, and replaces them. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from tidal_connector.errors import ConfigError


def find_option(args: Sequence[str], name: str) -> str | None:
    """Return the value of an option, the last one where it is given twice; None where it is not given.

    Args:
        args: vLLM's arguments; ``--a-b V``, ``--a-b=V`` and ``--a_b V`` are the same to it.
        name: the option, such as ``--port``.

    Raises:
        ConfigError: its value is missing.
    """
    found = None
    for position, word in enumerate(args):
        flag, equals, value = word.partition("=")
        if _same(flag, name):
            if not equals:
                if position + 1 == len(args):
                    raise ConfigError(f"{name}: its value is missing")
                value = args[position + 1]
            found = value
    return found


def without_option(args: Sequence[str], name: str) -> list[str]:
    """Return the arguments without an option and its value."""
    kept: list[str] = []
    skip = False
    for word in args:
        if skip:
            skip = False
            continue
        flag, equals, _ = word.partition("=")
        if _same(flag, name):
            skip = not equals
        else:
            kept.append(word)
    return kept


def has_flag(args: Sequence[str], name: str) -> bool:
    """Whether an option is there, with or without a value."""
    return any(_same(word.partition("=")[0], name) for word in args)


def served_name(args: Sequence[str]) -> str:
    """Return the name under which the model is served; empty where the arguments do not say it."""
    return find_option(args, "--served-model-name") or find_option(args, "--model") or ""


def _same(flag: str, name: str) -> bool:
    return flag.startswith("--") and flag.replace("_", "-") == name
