# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from tidal_connector.errors import ConfigError
from tidal_connector.modelmaker.shape import hf_config, model_shape, rope_frequency


def _shape(arch: str, **sizes: int) -> object:
    return model_shape(arch, layers=sizes.get("layers"), topk=sizes.get("topk", 64), dtype="float32", vocab=263)


@pytest.mark.parametrize("arch", ["v32", "glm", "v3"])
def test_transformers_reads_the_config(arch: str) -> None:
    from transformers import CONFIG_MAPPING

    config = hf_config(_shape(arch), bos=256, eos=257, pad=258)
    parsed = CONFIG_MAPPING[config["model_type"]](**config)
    assert parsed.kv_lora_rank == 512
    assert parsed.qk_rope_head_dim == 64
    assert parsed.rope_parameters["rope_type"] == "yarn"
    assert parsed.first_k_dense_replace == parsed.num_hidden_layers


def test_only_sparse_architectures_have_an_index() -> None:
    assert hf_config(_shape("v32"), bos=0, eos=1, pad=2)["index_topk"] == 64
    assert "index_topk" not in hf_config(_shape("v3"), bos=0, eos=1, pad=2)


def test_glm_has_two_whole_groups_of_a_leader_and_three_followers() -> None:
    shape = _shape("glm")
    assert [shape.has_indexer(layer) for layer in range(shape.layers)] == [True, False, False, False] * 2
    config = hf_config(shape, bos=0, eos=1, pad=2)
    followers = [max(i - config["index_skip_topk_offset"] + 1, 0) % config["index_topk_freq"] != 0 for i in range(8)]
    assert followers == [False, True, True, True] * 2


@pytest.mark.parametrize(
    ("field", "wrong"),
    [("arch", {"arch": "v5"}), ("dtype", {"dtype": "int8"}), ("layers", {"layers": 0}), ("topk", {"topk": 4096})],
)
def test_a_wrong_setting_is_named(field: str, wrong: dict[str, object]) -> None:
    settings = {"arch": "v32", "layers": 6, "topk": 64, "dtype": "float32", "vocab": 263} | wrong
    arch = settings.pop("arch")
    with pytest.raises(ConfigError, match=rf"^{field} .*expected"):
        model_shape(arch, **settings)


def test_slow_rope_pairs_turn_slowly() -> None:
    turns = [6.283185 / rope_frequency(pair) for pair in range(32)]
    assert turns == sorted(turns)
    assert 500 < turns[15] < 1_000
    assert 4_000 < turns[20] < 12_000
