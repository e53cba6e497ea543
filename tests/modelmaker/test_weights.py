# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch

from tidal_connector.modelmaker.shape import ModelShape, model_shape
from tidal_connector.modelmaker.weights import CODE, FLAGS, Recipe, fair_recipe, tensors

ARCHES = ["v32", "glm", "v3"]


def _shape(arch: str, dtype: str = "float32", topk: int = 64) -> ModelShape:
    return model_shape(arch, layers=None, topk=topk, dtype=dtype, vocab=263)


def _weights(arch: str, seed: int = 7, dtype: str = "float32") -> dict[str, torch.Tensor]:
    return dict(tensors(_shape(arch, dtype), seed, Recipe()))


@pytest.mark.parametrize("arch", ARCHES)
def test_a_seed_gives_the_same_weights_and_another_seed_others(arch: str) -> None:
    first, again, other = _weights(arch), _weights(arch), _weights(arch, seed=8)
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


@pytest.mark.parametrize("arch", ARCHES)
def test_no_layer_writes_into_the_code_lane(arch: str) -> None:
    written = {n: t for n, t in _weights(arch).items() if "o_proj" in n or "down_proj" in n}
    assert len(written) == 2 * _shape(arch).layers
    assert all(not tensor[: CODE + FLAGS].any() for tensor in written.values())
    assert all(tensor[CODE + FLAGS :].all() for tensor in written.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("arch", ["v32", "glm"])
def test_index_keys_survive_fp8_whatever_the_context_says(arch: str, dtype: str) -> None:
    weights = _weights(arch, dtype=dtype)
    prefix = "model.layers.4.self_attn.indexer"
    hidden = weights["model.embed_tokens.weight"].float()
    keys = []
    for trial in range(2):  # the same tokens with other contexts
        lane = CODE + FLAGS
        context = torch.randn(hidden.shape[0], hidden.shape[1] - lane, generator=torch.Generator().manual_seed(trial))
        state = torch.cat([hidden[:, :lane], context], dim=1)
        state = (state / state.square().mean(-1, keepdim=True).sqrt()).to(weights[f"{prefix}.wk.weight"].dtype)
        key = torch.nn.functional.layer_norm(
            (state @ weights[f"{prefix}.wk.weight"].T).float(),
            (128,),
            weights[f"{prefix}.k_norm.weight"],
            weights[f"{prefix}.k_norm.bias"],
            1e-6,
        )
        keys.append((key * 256).to(torch.float8_e4m3fn).float() / 256)
    assert torch.equal(keys[0], keys[1])
    assert torch.equal(keys[0][:, 64:].abs(), torch.ones(263, 64))


def test_each_token_drives_one_index_head() -> None:
    weights = _weights("v32")
    embedding = weights["model.embed_tokens.weight"]
    driven = embedding @ weights["model.layers.0.self_attn.indexer.weights_proj.weight"].T
    assert torch.equal(driven.sum(-1), torch.ones(263))
    assert torch.equal(driven.amax(-1), torch.ones(263))
    assert driven.sum(0).min() > 60


def test_followers_have_no_indexer() -> None:
    names = [name for name in _weights("glm") if name.endswith("indexer.wk.weight")]
    assert names == ["model.layers.0.self_attn.indexer.wk.weight", "model.layers.4.self_attn.indexer.wk.weight"]
    assert not any("indexer" in name for name in _weights("v3"))


def test_weights_have_the_dtype_except_the_index_norm() -> None:
    weights = _weights("v32", dtype="bfloat16")
    odd = {name for name, tensor in weights.items() if tensor.dtype is not torch.bfloat16}
    assert odd == {name for name in weights if ".k_norm." in name}


def test_more_rows_get_a_sharper_head() -> None:
    assert fair_recipe(_shape("v32", topk=2048)).head > fair_recipe(_shape("v32")).head
    assert fair_recipe(_shape("v3")).head > fair_recipe(_shape("v32")).head
