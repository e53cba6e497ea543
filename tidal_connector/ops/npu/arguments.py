# SPDX-License-Identifier: Apache-2.0
"""The operators' tensors by name, in the order in which CANN, the simulation and torch take them. No torch."""

from __future__ import annotations

GATHER_SELECTION_KV_CACHE = (
    "selection_k_rope",
    "selection_kv_cache",
    "selection_kv_block_table",
    "selection_kv_block_status",
    "selection_topk_indices",
    "full_k_rope",
    "full_kv_cache",
    "full_kv_block_table",
    "full_kv_actual_seq",
    "full_q_actual_seq",
)
GATHER_MISS_ROWS = (
    "selection_k_rope",
    "selection_kv_cache",
    "full_k_rope",
    "full_kv_cache",
    "miss_rows",
    "miss_slots",
    "miss_count",
)
