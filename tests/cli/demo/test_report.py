# SPDX-License-Identifier: Apache-2.0
"""The verdict names whatever is not as it must be, and the JSON has the promised keys."""

from __future__ import annotations

import io
from typing import Any

import msgspec
import pytest
from rich.console import Console

from tidal_connector.cli.demo.report import Result, Row, show

GOOD = Result(
    requests=26,
    identical=26,
    max_logprob_diff=0.001,
    bytes_pushed=1000,
    bytes_expected=1000,
    landed_before_prefill_end=0.9,
    pool_bytes=256 << 20,
    hugepage_bytes=128 << 20,
    device_bytes_per_token_layer=132.0,
    baseline_bytes_per_token_layer=2436.0,
    sabotage_detected=True,
    sabotage_logprob_diff=1.5,
    transfers_failed=0,
    arch="v32",
    dtype="float32",
    block_size=16,
    max_num_batched_tokens=2048,
    prefix_caching=False,
    seconds=100.0,
    start_seconds=40.0,
    rows=(Row(17, "one by one", True, 0.001),),
)


def shown(result: Result) -> str:
    text = io.StringIO()
    show(result, Console(file=text, width=100))
    return text.getvalue()


def test_a_good_result_has_no_shortcomings_and_says_so() -> None:
    assert GOOD.shortcomings() == []
    text = shown(GOOD)
    assert "all identical: 26 of 26 requests" in text
    assert "256 MiB, 50% on hugepages" in text
    assert "132 B with the host pool, 2,436 B without" in text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"identical": 25}, "1 of 26 requests differ"),
        ({"max_logprob_diff": 0.021}, "logprobs differ by up to 0.021"),
        ({"bytes_pushed": 999}, "999 bytes were pushed, 1000 are the prompts' rows"),
        ({"landed_before_prefill_end": 0.79}, "only 79% had landed"),
        ({"transfers_failed": 2}, "2 transfers failed"),
        ({"sabotage_detected": False}, "went unnoticed"),
    ],
)
def test_each_shortcoming_is_named(change: dict[str, Any], words: str) -> None:
    result = msgspec.structs.replace(GOOD, **change)
    assert len(result.shortcomings()) == 1
    assert words in result.shortcomings()[0]
    assert "failed" in shown(result)


def test_what_was_not_measured_is_no_shortcoming() -> None:
    result = msgspec.structs.replace(GOOD, bytes_expected=None, bytes_pushed=7, landed_before_prefill_end=None)
    assert result.shortcomings() == []
    assert "no prompt of several chunks" in shown(result)


def test_the_json_has_the_promised_keys() -> None:
    assert set(msgspec.to_builtins(GOOD)) >= {
        "requests", "identical", "max_logprob_diff", "bytes_pushed", "landed_before_prefill_end", "hugepage_bytes",
        "device_bytes_per_token_layer", "baseline_bytes_per_token_layer", "sabotage_detected",
    }  # fmt: skip


def test_bfloat16_is_held_to_the_noise_that_its_rounding_makes() -> None:
    rounded = msgspec.structs.replace(GOOD, dtype="bfloat16", max_logprob_diff=0.4, identical=GOOD.requests - 1)
    assert rounded.shortcomings() == []
    (line,) = msgspec.structs.replace(rounded, max_logprob_diff=0.7).shortcomings()
    assert "more than 0.6" in line
