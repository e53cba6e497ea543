# SPDX-License-Identifier: Apache-2.0
"""The demo from the first line to the verdict.

Everything that is started or changed is entered into one ``ExitStack``; an error, Ctrl-C or SIGTERM at any point
undoes it.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from rich.console import Console

from tidal_connector.cli.demo.client import ask_many, ask_sabotaged
from tidal_connector.cli.demo.compare import Generated, compare
from tidal_connector.cli.demo.expect import RowBytes, row_bytes
from tidal_connector.cli.demo.prompts import LENGTHS, QUICK_LENGTHS, SABOTAGE_LENGTH, make_prompts
from tidal_connector.cli.demo.report import Result, Row, logprob_bound, show
from tidal_connector.cli.ends import write_json
from tidal_connector.cli.interrupts import sigterm_interrupts
from tidal_connector.cluster.hugepages import extra_hugepages
from tidal_connector.cluster.launch import StartFailed
from tidal_connector.cluster.stack import Stack, StackSettings, read_metrics
from tidal_connector.config import parse_bytes

_NEW_TOKENS = 32
_AT_ONCE = 8
_SETTLE_S = 15.0
_POLL_S = 0.2
_SABOTAGED_TOKEN = 31
_PUSHED = "tidal:bytes_pushed_total"
_LANDED = "tidal:bytes_landed_before_prefill_end_total"
_FAILED = "tidal:transfers_failed_total"


class DemoOptions(msgspec.Struct, frozen=True):
    """What ``tidal demo`` was asked for; the command's help says what each means."""

    arch: str = "v32"
    dtype: str = "float32"
    model: Path | None = None
    block_size: int = 16
    max_num_batched_tokens: int = 2048
    prefix_caching: bool = False
    pool: str = "256MiB"
    json_file: Path | None = None
    keep_logs: Path | None = None
    quick: bool = False
    seed: int = 7


def run_demo(options: DemoOptions, console: Console) -> Result:
    """Run the demo, print its tables, write its JSON, and return the result.

    Raises:
        TidalError: an engine did not start, a request failed, or a setting cannot be used.
        KeyboardInterrupt: Ctrl-C or SIGTERM; everything is undone.
    """
    started = time.monotonic()
    pool_bytes = parse_bytes("--pool", options.pool)
    with contextlib.ExitStack() as stack:
        stack.enter_context(sigterm_interrupts())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidal-demo-")))
        scratch = folder / "scratch"  # sockets and the like, so that they go with the folder
        scratch.mkdir()
        model = options.model or _make_model(options, folder / "model", console)
        rows = row_bytes(model, options.dtype)
        console.print(stack.enter_context(extra_hugepages(pool_bytes)))
        settings = StackSettings(
            model=model,
            logs=options.keep_logs or folder / "logs",
            dtype=options.dtype,
            block_size=options.block_size,
            max_num_batched_tokens=options.max_num_batched_tokens,
            prefix_caching=options.prefix_caching,
            pool_bytes=pool_bytes,
            decode_tidal={"allow_sabotage": True},
            environment={"TMPDIR": str(scratch)},
        )
        servers = _start(settings, stack, console)
        start_seconds = time.monotonic() - started
        run = _Run(options, servers, rows, console)
        result = run.result(started, start_seconds)
        stack.enter_context(console.status("ending the processes"))
    show(result, console)
    write_json(result, options.json_file)
    return result


class _Run:
    """Asks a started deployment and collects what it finds."""

    def __init__(self, options: DemoOptions, servers: Stack, rows: RowBytes, console: Console) -> None:
        self._options = options
        self._servers = servers
        self._rows = rows
        self._console = console
        lengths = QUICK_LENGTHS if options.quick else LENGTHS
        self._prompts = make_prompts(lengths, options.seed, options.prefix_caching)

    def result(self, started: float, start_seconds: float) -> Result:
        assert self._servers.reference is not None
        reference = self._ask("the reference engine", self._servers.reference.url, 1)
        alone, landed = self._one_by_one()
        together = self._ask(f"{_AT_ONCE} at once", self._servers.proxy.url, _AT_ONCE)
        rows = (
            *self._rows_of("one by one", alone, reference),
            *self._rows_of(f"{_AT_ONCE} at once", together, reference),
        )
        expected = None if self._options.prefix_caching else 2 * self._expected_bytes()
        prefill = self._settled(expected or 0)
        decode = read_metrics(self._servers.decode)
        sabotage = self._sabotage()
        return Result(
            requests=len(rows),
            identical=sum(row.tokens_equal for row in rows),
            max_logprob_diff=max(row.logprob_diff for row in rows),
            bytes_pushed=int(prefill.get(_PUSHED, 0)),
            bytes_expected=expected,
            landed_before_prefill_end=landed,
            pool_bytes=int(decode.get("tidal:pool_bytes", 0)),
            hugepage_bytes=int(decode.get("tidal:pool_hugepage_bytes", 0)),
            device_bytes_per_token_layer=self._rows.device_with,
            baseline_bytes_per_token_layer=self._rows.device_without,
            sabotage_detected=sabotage > logprob_bound(self._options.dtype),
            sabotage_logprob_diff=sabotage,
            transfers_failed=int(prefill.get(_FAILED, 0) + decode.get(_FAILED, 0)),
            arch=self._options.arch,
            dtype=self._options.dtype,
            block_size=self._options.block_size,
            max_num_batched_tokens=self._options.max_num_batched_tokens,
            prefix_caching=self._options.prefix_caching,
            seconds=round(time.monotonic() - started, 1),
            start_seconds=round(start_seconds, 1),
            rows=rows,
        )

    def _one_by_one(self) -> tuple[list[Generated], float | None]:
        """Send every prompt alone; measure how early the longest one's bytes landed."""
        answers = []
        landed = None
        longest = max(self._prompts, key=len)
        with self._console.status("") as status:
            for number, prompt in enumerate(self._prompts, 1):
                status.update(f"one by one: prompt {number} of {len(self._prompts)}, {len(prompt)} tokens")
                several_chunks = prompt is longest and len(prompt) > self._options.max_num_batched_tokens
                sent = [self._rows.prompt(len(item)) for item in self._prompts[:number]]
                before = self._settled(sum(sent[:-1])) if several_chunks else {}
                answers += ask_many(self._servers.proxy.url, [prompt], _NEW_TOKENS, 1)
                if several_chunks:
                    after = self._settled(sum(sent))
                    moved, early = (after.get(k, 0) - before.get(k, 0) for k in (_PUSHED, _LANDED))
                    landed = early / moved if moved else 0.0
        self._console.print(f"one by one: {len(answers)} prompts answered")
        return answers, landed

    def _ask(self, what: str, url: str, at_once: int) -> list[Generated]:
        started = time.monotonic()
        with self._console.status(f"{what}: {len(self._prompts)} prompts"):
            answers = ask_many(url, self._prompts, _NEW_TOKENS, at_once)
        self._console.print(f"{what}: {len(answers)} prompts answered in {time.monotonic() - started:.0f} s")
        return answers

    def _rows_of(self, batch: str, answers: list[Generated], reference: list[Generated]) -> list[Row]:
        rows = []
        for prompt, mine, wanted in zip(self._prompts, answers, reference, strict=True):
            found = compare(mine, wanted)
            rows.append(Row(len(prompt), batch, found.tokens_equal, found.logprob))
        return rows

    def _expected_bytes(self) -> int:
        return sum(self._rows.prompt(len(prompt)) for prompt in self._prompts)

    def _settled(self, pushed: int) -> dict[str, float]:
        """Return the prefill engine's metrics once they show so many pushed bytes, or after a bound.

        An engine reports at its next step, so the numbers may lag behind the answers for a moment.
        """
        deadline = time.monotonic() + _SETTLE_S
        while True:
            found = read_metrics(self._servers.prefill)
            if found.get(_PUSHED, 0) >= pushed or time.monotonic() > deadline:
                return found
            time.sleep(_POLL_S)

    def _sabotage(self) -> float:
        """Return how far an answer moves when one pool row is corrupted."""
        assert self._servers.reference is not None
        prompt = make_prompts((SABOTAGE_LENGTH,), self._options.seed + 1, shared_prefix=False)[0]
        with self._console.status("once more with one corrupted pool row"):
            wanted = ask_many(self._servers.reference.url, [prompt], _NEW_TOKENS, 1)[0]
            layer = self._rows.layers // 2
            spoilt = ask_sabotaged(self._servers, prompt, _NEW_TOKENS, layer, _SABOTAGED_TOKEN)
        return compare(spoilt, wanted).logprob


def _make_model(options: DemoOptions, folder: Path, console: Console) -> Path:
    from tidal_connector.modelmaker.api import make_model

    with console.status(f"making a small {options.arch} checkpoint"):
        make_model(folder, arch=options.arch, dtype=options.dtype)
    console.print(f"a small {options.arch} checkpoint is made")
    return folder


def _start(settings: StackSettings, stack: contextlib.ExitStack, console: Console) -> Stack:
    started = time.monotonic()
    with console.status("starting") as status:
        try:
            servers = stack.enter_context(Stack(settings, _progress(status.update)))
        except StartFailed as error:
            raise StartFailed(f"{error}\nThe whole log is kept with --keep-logs DIR.") from None
    console.print(f"reference, prefill, decode and proxy serve after {time.monotonic() - started:.0f} s")
    return servers


def _progress(update: Callable[[str], None]) -> Callable[[list[str], float], None]:
    def show_waiting(names: list[str], seconds: float) -> None:
        update(f"waiting for {', '.join(names)} ({seconds:.0f} s)")

    return show_waiting
