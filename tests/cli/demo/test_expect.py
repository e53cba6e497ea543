# SPDX-License-Identifier: Apache-2.0
"""Row sizes come from the checkpoint; the figures here are worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tidal_connector.cli.demo.expect import row_bytes
from tidal_connector.errors import ConfigError

V32 = {"num_hidden_layers": 6, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}


def model(folder: Path, **more: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({**V32, **more}))
    return folder


def test_v32_in_bfloat16_has_the_sizes_of_the_design(tmp_path: Path) -> None:
    rows = row_bytes(model(tmp_path), "bfloat16")
    assert (rows.device_without, rows.device_with) == (1284, 132)


def test_a_prompt_moves_all_rows_but_the_last(tmp_path: Path) -> None:
    rows = row_bytes(model(tmp_path), "float32")
    assert rows.moved == 6 * (2304 + 132)
    assert [rows.prompt(tokens) for tokens in (0, 1, 17)] == [0, 0, 16 * rows.moved]


def test_layers_that_share_a_selection_have_no_index_keys(tmp_path: Path) -> None:
    rows = row_bytes(model(tmp_path, num_hidden_layers=10, index_topk_freq=4, index_skip_topk_offset=2), "bfloat16")
    assert rows.index == 4 * 132  # layers 0, 1, 5 and 9


def test_a_pattern_names_the_layers_that_share(tmp_path: Path) -> None:
    assert row_bytes(model(tmp_path, index_topk_pattern="FSSFSS"), "bfloat16").index == 2 * 132


def test_a_dense_checkpoint_has_no_index_keys(tmp_path: Path) -> None:
    assert row_bytes(model(tmp_path, index_head_dim=0), "bfloat16").index == 0


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        row_bytes(tmp_path, "float32")
