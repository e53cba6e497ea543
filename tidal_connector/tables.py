# SPDX-License-Identifier: Apache-2.0
"""Tables of settings (JSON or TOML) become frozen structs; what is wrong in them is one line that names the field.

Pure but for reading the file.
"""

from __future__ import annotations

import difflib
import enum
import re
import tomllib
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from tidal_connector.errors import ConfigError

Settings = typing.TypeVar("Settings", bound=msgspec.Struct)

_PLACE = re.compile(r"(?P<what>.*) - at `\$\.?(?P<path>[^`]*)`")


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """Read a TOML file.

    Args:
        path: where it is.
        what: kind of file, for messages.

    Raises:
        ConfigError: it is not there, cannot be read, or is no TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{what} {path}: no such file") from None
    except OSError as error:
        raise ConfigError(f"{what} {path}: cannot be read ({error.strerror})") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{what} {path}: {error}") from None


def convert_strict(kind: type[Settings], given: Mapping[str, Any], where: str) -> Settings:
    """Turn a table of settings (JSON or TOML) into its frozen struct.

    Args:
        kind: the struct.
        given: the table as it was read.
        where: what the table is called in messages: a file or an option.

    Raises:
        ConfigError: a key is unknown (the nearest known one is named) or a value is of the wrong type or
            range.
    """
    _refuse_unknown(kind, given, where, "")
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {_explained(kind, given, str(error))}") from None


def _explained(kind: type[msgspec.Struct], given: Any, message: str) -> str:
    """Return a message of msgspec with the field in front, its value, and the values that a choice may have."""
    found = _PLACE.fullmatch(message)
    if found is None:
        return message
    path, annotation = found["path"], kind
    value: Any = given
    for part in re.findall(r"[^.\[\]]+", path):
        if isinstance(value, list) and part.isdigit():
            value = value[int(part)]
            continue
        struct = _struct_of(annotation)
        if struct is None or part not in value:
            return f"{path}: {found['what']}"
        value, annotation = value[part], typing.get_type_hints(struct)[part]
    choices = _choices_of(annotation)
    what = f"expected {' or '.join(map(repr, choices))}" if choices else found["what"].replace("Expected", "expected")
    return f"{path} = {value!r}: {what}"


def _choices_of(annotation: Any) -> list[str]:
    if isinstance(annotation, type) and issubclass(annotation, enum.StrEnum):
        return [str(item) for item in annotation]
    if typing.get_origin(annotation) is typing.Literal:
        return list(typing.get_args(annotation))
    if isinstance(annotation, types.UnionType):
        return [choice for part in typing.get_args(annotation) for choice in _choices_of(part)]
    return []


def _struct_of(annotation: Any) -> type[msgspec.Struct] | None:
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) in (tuple, list):
        found = (_struct_of(part) for part in typing.get_args(annotation))
        return next((item for item in found if item is not None), None)
    return annotation if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct) else None


def _refuse_unknown(kind: type[msgspec.Struct], given: Mapping[str, Any], where: str, path: str) -> None:
    hints = typing.get_type_hints(kind)
    for key, value in given.items():
        if key not in hints:
            near = difflib.get_close_matches(str(key), hints, n=1)
            hint = f"did you mean {path + near[0]!r}?" if near else f"known: {', '.join(sorted(hints))}"
            raise ConfigError(f"{where}: unknown key {path + str(key)!r}; {hint}")
        inner = _struct_of(hints[key])
        if inner is None:
            continue
        places = {f"[{number}]": item for number, item in enumerate(value)} if isinstance(value, list) else {"": value}
        for place, item in places.items():
            if isinstance(item, Mapping):
                _refuse_unknown(inner, item, where, f"{path}{key}{place}.")
