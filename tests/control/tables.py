# SPDX-License-Identifier: Apache-2.0
"""Reads the tables of the protocol's README, so that tests can hold them to the code."""

from __future__ import annotations

from pathlib import Path

import tidal_connector.control

README = Path(tidal_connector.control.__file__).with_name("README.md")


def table_rows(heading: str) -> list[tuple[str, str, str]]:
    """Return the first three columns of the table under a heading."""
    lines = README.read_text(encoding="utf-8").split(f"## {heading}\n", 1)[1].splitlines()
    rows: list[tuple[str, str, str]] = []
    for line in lines:
        if line.startswith("## "):
            break
        if line.startswith("| ") and not line.startswith("| ---"):
            cells = [cell.strip().strip("`") for cell in line.strip("|").split("|")]
            rows.append((cells[0], cells[1], cells[2]))
    return rows[1:]
