# SPDX-License-Identifier: Apache-2.0
"""The vLLM-facing package agrees with the types of both hosts. About 20 s for each at first, 3 s from mypy's cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm_plugin.ascend.bed.hosttypes import Host, complaints
from tests.vllm_plugin.ascend.bed.sources import Sources

pytestmark = [pytest.mark.contract, pytest.mark.timeout(480)]

WRONG = """\
from vllm.v1.request import Request


def tokens(request: Request) -> str:
    return request.num_prompt_tokens
"""


@pytest.fixture
def ascend(sources: Sources) -> Host:
    return Host("0.23", "ascend", (sources.vllm, sources.vllm_ascend))


def agree(host: Host) -> None:
    found = complaints(host)
    if found:
        pytest.fail(found, pytrace=False)


def test_our_code_agrees_with_vllm_0_23_and_vllm_ascend(ascend: Host) -> None:
    agree(ascend)


def test_our_code_agrees_with_vllm_0_32() -> None:
    agree(Host("0.32", "cpu"))


def test_a_wrong_use_of_a_host_type_is_found(ascend: Host, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text(WRONG)
    assert 'got "int", expected "str"' in complaints(ascend, wrong)
