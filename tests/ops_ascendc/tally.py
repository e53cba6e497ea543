# SPDX-License-Identifier: Apache-2.0
"""What the kernels did in one run of the tests, added up from the counters of the simulation and of the reference."""

from __future__ import annotations

from dataclasses import dataclass, field

from rich.table import Table


@dataclass
class Line:
    """One line of the summary; bytes are those of the full pool."""

    cases: int = 0
    steps: int = 0
    hits: int = 0
    misses: int = 0
    moves: int = 0
    bytes_read: int = 0  # by the DMA of the simulated cores
    bytes_missed: int = 0  # misses x bytes of a row, tokens for blocks

    def add(self, other: Line) -> None:
        """Add another line."""
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass
class Tally:
    """Lines by what ran, and the coverage of the kernels if it was measured: file -> (lines run, lines)."""

    lines: dict[str, Line] = field(default_factory=dict)
    coverage: dict[str, tuple[int, int]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def line(self, name: str) -> Line:
        """Return the line of that name."""
        return self.lines.setdefault(name, Line())

    def table(self) -> Table:
        """Return the summary."""
        table = Table(title="simulated kernels", title_justify="left")
        table.add_column("what ran")
        for name in ("cases", "steps", "hits", "misses", "moves", "bytes read", "misses x row bytes", "equal"):
            table.add_column(name, justify="right")
        total = Line()
        for line in self.lines.values():
            total.add(line)
        for name, line in [*sorted(self.lines.items()), ("all", total)]:
            numbers = (line.cases, line.steps, line.hits, line.misses, line.moves, line.bytes_read, line.bytes_missed)
            equal = "yes" if line.bytes_read == line.bytes_missed else "NO"
            table.add_row(name, *(f"{number:,}" for number in numbers), equal)
        return table

    def words(self) -> list[str]:
        """Return what the table does not hold, a line each."""
        said = []
        if self.faults:
            said.append(f"planted faults caught: {len(self.faults)}")
        if self.coverage:
            run, lines = (sum(each[i] for each in self.coverage.values()) for i in (0, 1))
            files = ", ".join(f"{name} {100 * a / b:.1f} %" for name, (a, b) in sorted(self.coverage.items()))
            said.append(f"line coverage of the kernels: {100 * run / lines:.1f} % ({run} of {lines} lines; {files})")
        return said
