# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tidal_connector.errors import ConfigError, LayoutMismatch  # noqa: E402
from tidal_connector.layout import Home, RegionKind  # noqa: E402
from tidal_connector.vllm_plugin.translate import (  # noqa: E402
    cache_kind,
    checkpoint_digest,
    engine_facts,
    layer_index,
    model_layout,
    place_caches,
    placement_of,
    storages,
)

BLOCKS, TOKENS = 5, 16


def latent(layer: int) -> str:
    return f"model.layers.{layer}.self_attn.attn"


def index(layer: int) -> str:
    return f"model.layers.{layer}.self_attn.indexer.k_cache"


def caches() -> dict[str, Any]:
    """Two layers of one storage each kind; the second shares the first's selection and so has no index keys."""
    latents = torch.zeros(2, BLOCKS, 1, TOKENS, 576, dtype=torch.bfloat16)
    return {
        latent(0): latents[0],
        index(0): torch.zeros(BLOCKS, 1, TOKENS, 132, dtype=torch.uint8),
        latent(1): latents[1],
    }


def test_fr_29_every_cache_has_its_own_region_although_two_share_a_storage() -> None:
    given = caches()
    placed = dict(place_caches(given, [latent(0), latent(1)]))
    assert list(placed) == [latent(0), index(0), latent(1)]
    first, second = placed[latent(0)], placed[latent(1)]
    assert second.base - first.base == BLOCKS * TOKENS * 1152
    assert (first.row_bytes, first.page_stride, first.page_tokens, first.pages) == (1152, TOKENS * 1152, TOKENS, BLOCKS)
    assert (first.home, placed[index(0)].home) == (Home.HOST, Home.DEVICE)
    assert placed[index(0)].row_bytes == 132
    assert len(storages(given)) == 2
    given[latent(1)][3, 0, 2, 0] = 1.0
    address = second.address(3, 2)
    assert address == given[latent(1)][3, 0, 2].data_ptr()


def test_fr_29_an_unknown_cache_is_an_error_at_start() -> None:
    with pytest.raises(LayoutMismatch, match="neither a latent nor an index-key cache"):
        place_caches({"model.layers.0.mixer.state": torch.zeros(2, 1, 4, 8)}, [])


def test_pages_whose_rows_are_not_contiguous_are_refused() -> None:
    with pytest.raises(LayoutMismatch, match="contiguous rows"):
        place_caches({latent(0): torch.zeros(TOKENS, BLOCKS, 576).transpose(0, 1)}, [])


def ascend_caches(scales: bool = False) -> dict[str, Any]:
    """Two layers as vllm-ascend registers them: tuples of pages without a head dimension of their own."""

    def pages(width: int, dtype: Any = torch.bfloat16) -> Any:
        return torch.zeros(BLOCKS, TOKENS, 1, width, dtype=dtype)

    index = (pages(128, torch.int8), pages(1, torch.float16)) if scales else (pages(128),)
    return {latent(0): (pages(512), pages(64), *index), latent(1): (pages(512), pages(64))}


def test_a_layer_that_is_a_tuple_has_a_region_for_each_part() -> None:
    given = ascend_caches(scales=True)
    placed = place_caches(given, [latent(0), latent(1)], {latent(0): (1 << 40, 1 << 41), latent(1): (1 << 42, 1 << 43)})
    regions = [region for _, region in placed]
    assert [(r.layer, str(r.kind), r.row_bytes, str(r.home)) for r in regions] == [
        (0, "latent-nope", 1024, "host"),
        (0, "latent-rope", 128, "host"),
        (0, "index", 128, "device"),
        (0, "index-scale", 2, "device"),
        (1, "latent-nope", 1024, "host"),
        (1, "latent-rope", 128, "host"),
    ]
    assert [r.base for r in regions if r.home is Home.HOST] == [1 << 40, 1 << 41, 1 << 42, 1 << 43]
    assert regions[2].base == given[latent(0)][2].data_ptr()
    assert [r.page_stride for r in regions[:2]] == [TOKENS * 1024, TOKENS * 128]
    assert len(storages(given, [latent(0), latent(1)])) == 2  # index keys and their scales
    assert len(storages(given)) == 6


def test_engines_on_ascend_agree_on_a_layout_wherever_each_keeps_its_latents() -> None:
    given = ascend_caches()
    prefill = place_caches(given, [])
    decode = place_caches(given, [latent(0), latent(1)], {latent(0): (1 << 40, 1 << 41), latent(1): (1 << 42, 1 << 43)})
    layouts = [model_layout(vllm_config(), given, placed, "") for placed in (prefill, decode)]
    assert layouts[0].fingerprint() == layouts[1].fingerprint()
    assert layouts[0].sharing == (0, 0)
    assert [(r.latent_dtype, r.rope_bytes) for r in layouts[0].regions[:2]] == [("bfloat16", 0), ("bfloat16", 128)]
    assert (layouts[0].latent_bytes, layouts[0].index_bytes) == (2 * 1152, 256)
    placement_of(decode).check(layouts[0])
    other = model_layout(vllm_config(), caches(), place_caches(caches(), []), "")
    assert other.fingerprint() != layouts[0].fingerprint()


def test_packed_latents_are_one_region_and_tuples_without_meaning_are_refused() -> None:
    packed = torch.zeros(BLOCKS, TOKENS, 1, 656, dtype=torch.int8)
    keys = torch.zeros(BLOCKS, TOKENS, 1, 128, dtype=torch.bfloat16)
    assert [str(r.kind) for _, r in place_caches({latent(0): (packed, keys)}, [])] == ["latent", "index"]
    for wrong in ((), (keys,), (keys,) * 5):
        with pytest.raises(LayoutMismatch, match=f"{len(wrong)} tensors"):
            place_caches({latent(0): wrong}, [])


def test_caches_on_an_accelerator_are_refused_until_their_events_are_waited_for() -> None:
    with pytest.raises(LayoutMismatch, match="is on meta: TidalConnector serves CPU engines"):
        place_caches({latent(0): torch.zeros(BLOCKS, 1, TOKENS, 576, device="meta")}, [])


@pytest.mark.parametrize("name", ["model.norm", "model.layers.1.mtp.2.attn"])
def test_a_name_without_one_layer_number_is_refused(name: str) -> None:
    with pytest.raises(LayoutMismatch, match="one layer number"):
        layer_index(name)


def test_kinds_go_by_name() -> None:
    assert (cache_kind(latent(3)), cache_kind(index(3))) == (RegionKind.LATENT, RegionKind.INDEX)


def vllm_config(role: str = "kv_consumer", extra: dict[str, Any] | None = None, **parallel: Any) -> Any:
    text = SimpleNamespace(model_type="glm_moe_dsa", index_topk=64, qk_rope_head_dim=64, rope_theta=1e4)
    transfer = SimpleNamespace(
        kv_connector_extra_config=extra or {}, kv_role=role, engine_id="e", kv_load_failure_policy="fail"
    )
    return SimpleNamespace(
        kv_transfer_config=transfer,
        parallel_config=SimpleNamespace(**parallel),
        cache_config=SimpleNamespace(block_size=16, cache_dtype="auto"),
        model_config=SimpleNamespace(hf_text_config=text, model="some/model"),
        lora_config=None,
    )


def test_the_layout_names_leaders_rope_and_dtypes() -> None:
    given = caches()
    placed = place_caches(given, [])
    layout = model_layout(vllm_config(), given, placed, "")
    assert layout.sharing == (0, 0)
    assert layout.index_topk == 64
    assert layout.weights == "some/model"
    assert layout.regions[0].rope_bytes == 128
    assert layout.regions[0].latent_dtype == "bfloat16"
    placement_of(placed).check(layout)
    other = model_layout(vllm_config(), given, placed, "v2")
    assert other.fingerprint() != layout.fingerprint()


@pytest.mark.parametrize(
    ("role", "extra", "expected"),
    [
        ("kv_consumer", {}, True),
        ("kv_both", {}, False),
        ("kv_both", {"offload": "on"}, True),
        ("kv_producer", {}, False),
    ],
)
def test_who_offloads(role: str, extra: dict[str, Any], expected: bool) -> None:
    facts = engine_facts(vllm_config(role, extra))
    assert facts.offload is expected
    assert (facts.producer, facts.consumer) == (role != "kv_consumer", role != "kv_producer")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (vllm_config("kv_producer", {"offload": "on"}), "keeps its latents on the device"),
        (vllm_config(pipeline_parallel_size=2), "pipeline_parallel_size = 2"),
        (vllm_config(enable_dbo=True), "--enable-dbo"),
        (vllm_config(extra={"poool": 1}), "did you mean 'pool'"),
        (SimpleNamespace(kv_transfer_config=None), "--kv-transfer-config"),
    ],
)
def test_what_the_connector_cannot_serve_is_refused_at_start(config: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        engine_facts(config)


def test_ranks_and_replicas_are_counted() -> None:
    assert (engine_facts(vllm_config()).ranks, engine_facts(vllm_config()).replica) == (1, 0)
    facts = engine_facts(vllm_config(tensor_parallel_size=4, data_parallel_rank_local=None))
    assert (facts.ranks, facts.replica) == (4, 0)
    assert engine_facts(vllm_config(tensor_parallel_size=4, data_parallel_rank_local=3)).replica == 3


def test_fr_34_checkpoints_that_differ_in_one_value_have_different_digests(tmp_path: Path) -> None:
    for name, last in (("a", b"0"), ("b", b"1"), ("c", b"0")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_bytes(b"x" * 200_000 + last)
    a, b, c = (checkpoint_digest(str(tmp_path / name)) for name in "abc")
    assert a == c != b
