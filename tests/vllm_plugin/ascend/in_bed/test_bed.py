# SPDX-License-Identifier: Apache-2.0
"""The stock SFA backend of vllm-ascend 0.23, on its own sources, gives what dense attention gives; and the bed sees it.

What is compared: every layer's output of every step with ``dense.py``, which shares no code with the backend or with
the operators. In float16 the largest difference is about 0.25 %, in bfloat16 2 %.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm_ascend.attention.sfa_v1 import AscendSFAImpl

from tests.vllm_plugin.ascend.bed import dense
from tests.vllm_plugin.ascend.bed.case import Case, Run, bed, run_case
from tests.vllm_plugin.ascend.bed.operators import attention
from tests.vllm_plugin.ascend.bed.operators.rules import OperatorMisuse
from tests.vllm_plugin.ascend.bed.world import TOP_K, Shape

SHORT = Case(contexts=(300, 40), steps=3)
GLM = Case(contexts=(150, 40), steps=2, layers=("own", "shared"), shape=Shape(model_type="glm_moe_dsa"))
QUANTISED = Case(contexts=(2300,), steps=2, dtype=torch.bfloat16, quantised=True)


def worst(run: Run, steps: slice = slice(None)) -> dense.Difference:
    return dense.differences(run, steps)[0]


@pytest.mark.parametrize(
    ("case", "tolerance"),
    [
        pytest.param(SHORT, 0.005, id="short"),
        pytest.param(Case(contexts=(300, 40), steps=3, dtype=torch.bfloat16), 0.03, id="bfloat16"),
        pytest.param(Case(contexts=(2300, 150), steps=3), 0.005, id="beyond-top-k"),
        pytest.param(Case(contexts=(2300, 700), steps=2, chunk=512), 0.005, id="chunked"),
        pytest.param(
            Case(contexts=(300, 150, 40), steps=3, layers=("own", "shared", "own")), 0.005, id="shared-selection"
        ),
        pytest.param(Case(contexts=(300, 40), steps=3, queries=2, padding=2), 0.005, id="two-queries-and-padding"),
        pytest.param(GLM, 0.005, id="glm"),
        pytest.param(QUANTISED, 0.03, id="int8-index-keys"),
    ],
)
def test_the_stock_backend_equals_dense_attention_over_what_it_selected(case: Case, tolerance: float) -> None:
    difference = worst(run_case(AscendSFAImpl, case))
    assert difference.relative < tolerance, difference


def test_with_all_tokens_selected_it_is_dense_attention() -> None:
    run = run_case(AscendSFAImpl, SHORT)
    for step in run.steps:
        for selected in step.selected:
            ends = torch.cat([torch.arange(first, first + tokens) for _, first, tokens in step.requests]) + 1
            assert torch.equal((selected >= 0).sum(dim=-1), ends)


def test_beyond_top_k_the_best_tokens_are_selected() -> None:
    run = run_case(AscendSFAImpl, Case(contexts=(2300,), steps=2))
    for step in run.steps[1:]:
        ((request, first, tokens),) = step.requests
        for layer, selected in enumerate(step.selected):
            hidden = run.inputs(layer, request)[: first + tokens]
            scores = dense.index_scores(run.weights[layer], run.case.shape, hidden, range(first, first + tokens))
            taken = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, selected.long(), True)
            assert taken.sum() == TOP_K * tokens
            # Ranks next to the limit may swap where float16 cannot tell them apart.
            assert scores[taken].min() > scores[~taken].max() - 0.01 * scores.std()


def test_int8_index_keys_select_nearly_the_same_tokens() -> None:
    run = run_case(AscendSFAImpl, QUANTISED)
    step = run.steps[-1]
    ((request, first, tokens),) = step.requests
    for layer, selected in enumerate(step.selected):
        hidden = run.inputs(layer, request)[: first + tokens]
        scores = dense.index_scores(run.weights[layer], run.case.shape, hidden, range(first, first + tokens))
        best = set(scores[0].topk(TOP_K).indices.tolist())
        assert len(best & set(selected[0].tolist())) > 0.97 * TOP_K


def test_one_wrong_row_is_seen() -> None:
    with bed(Case(contexts=(2300,), steps=1), AscendSFAImpl) as opened:
        opened.prefill()
        honest = worst(opened.run, slice(0, 1))
        slot = opened.slots(0, int(opened.run.steps[0].selected[0][-1, 0]), 1).long()
        opened.caches[0][0].view(-1, 512)[slot] *= -1
        opened.decode()
        wrong = worst(opened.run, slice(1, 2))
    assert honest.relative < 0.005 < wrong.relative
    assert wrong.layer == 0


def test_a_selection_of_the_wrong_tokens_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = attention._index_scores
    monkeypatch.setattr(attention, "_index_scores", lambda *given: -honest(*given))
    with pytest.raises(AssertionError):
        test_beyond_top_k_the_best_tokens_are_selected()


def test_misuse_of_an_operator_fails_with_its_rule() -> None:
    class Swapped(AscendSFAImpl):
        """Hands the selection on back to front, so that empty entries come first."""

        def _execute_sparse_flash_attention_process(self, *given: Any) -> Any:
            ql_nope, q_pe, kv_cache, topk_indices, *rest = given
            return super()._execute_sparse_flash_attention_process(
                ql_nope, q_pe, kv_cache, topk_indices.flip(-1), *rest
            )

    with pytest.raises(OperatorMisuse, match="valid entries of sparse_indices have to come first"):
        run_case(Swapped, SHORT)
