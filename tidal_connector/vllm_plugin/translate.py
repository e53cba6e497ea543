# SPDX-License-Identifier: Apache-2.0
"""The only reader of vLLM's configuration: it becomes frozen values of ours, once, at start.

The layout of a model comes from its configuration and the caches that vLLM registered; where a cache lies
comes from its tensor. A cache that is neither a latent nor an index-key cache is refused at start, because
leaving one out would go unnoticed until the output is wrong.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tidal_connector.config import TidalConfig, load_config, with_aliases
from tidal_connector.errors import ConfigError, LayoutMismatch
from tidal_connector.ids import EngineId
from tidal_connector.layout import Home, KVLayout, Placement, Region, RegionKind, RegionSpec
from tidal_connector.log import get_logger

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

logger = get_logger(__name__)

INDEX_CACHE_SUFFIX = ".indexer.k_cache"
_SAMPLE = 1 << 16
_ROPE_KEYS = (
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "rope_interleave",
    "partial_rotary_factor",
    "original_max_position_embeddings",
)


class EngineFacts(msgspec.Struct, frozen=True):
    """What the connector's halves need to know of their engine.

    Attributes:
        engine: the engine's id.
        config: the connector's settings.
        producer: it may prefill for others.
        consumer: it may receive KV.
        offload: its latents live in the host pool.
        block_size: tokens per vLLM block.
        recompute: a failed receive is recomputed here (``kv_load_failure_policy``).
        ranks: tensor-parallel ranks, all of which hold the same latents and index keys.
    """

    engine: EngineId
    config: TidalConfig
    producer: bool
    consumer: bool
    offload: bool
    block_size: int
    recompute: bool
    ranks: int = 1


def settings(vllm_config: VllmConfig) -> TidalConfig:
    """Read the connector's settings: ``kv_connector_extra_config``, and the variables that stand in for it.

    Raises:
        ConfigError: there is no KV-transfer configuration, or a setting is wrong.
    """
    transfer = vllm_config.kv_transfer_config
    if transfer is None:
        raise ConfigError("TidalConnector needs --kv-transfer-config")
    return load_config(with_aliases(transfer.kv_connector_extra_config)[0])


def say_aliases(vllm_config: VllmConfig) -> None:
    """Log which variables stand in for settings; once the log is set up."""
    transfer = vllm_config.kv_transfer_config
    for note in with_aliases(transfer.kv_connector_extra_config)[1] if transfer is not None else ():
        logger.info("%s", note)


def engine_facts(vllm_config: VllmConfig) -> EngineFacts:
    """Translate the configuration.

    Raises:
        ConfigError: the connector's settings are wrong, or the engine uses what the connector cannot serve.
    """
    config = settings(vllm_config)
    transfer = vllm_config.kv_transfer_config
    parallel = vllm_config.parallel_config
    for name in (
        "pipeline_parallel_size",
        "prefill_context_parallel_size",
        "decode_context_parallel_size",
    ):
        size = vars(parallel).get(name, 1)
        if size > 1:
            raise ConfigError(
                f"{name} = {size}: TidalConnector serves engines whose ranks all hold the same rows; expected 1, and "
                "tensor_parallel_size for more ranks"
            )
    if vars(parallel).get("enable_dbo", False):
        raise ConfigError(
            "--enable-dbo: TidalConnector announces a layer once per step; expected no dual-batch overlap"
        )
    consumer = transfer.kv_role in ("kv_consumer", "kv_both")
    offload = config.offloads(transfer.kv_role)
    if offload and transfer.kv_role == "kv_producer":
        raise ConfigError(
            'offload = "on" with kv_role kv_producer: prefill keeps its latents on the device; '
            "use kv_consumer or kv_both"
        )
    return EngineFacts(
        engine=EngineId(str(transfer.engine_id)),
        config=config,
        producer=transfer.kv_role in ("kv_producer", "kv_both"),
        consumer=consumer,
        offload=offload,
        block_size=vllm_config.cache_config.block_size,
        recompute=transfer.kv_load_failure_policy == "recompute",
        ranks=vars(parallel).get("tensor_parallel_size", 1),
    )


def cache_kind(layer_name: str) -> RegionKind:
    """Tell which region a registered cache is, by its name.

    Raises:
        LayoutMismatch: it is neither a latent nor an index-key cache.
    """
    if layer_name.endswith(INDEX_CACHE_SUFFIX):
        return RegionKind.INDEX
    if layer_name.endswith(".attn"):
        return RegionKind.LATENT
    raise LayoutMismatch(
        f"cache {layer_name!r} is neither a latent nor an index-key cache; this model is not supported"
    )


def layer_index(layer_name: str) -> int:
    """Return the decoder layer that a cache belongs to.

    Raises:
        LayoutMismatch: the name does not hold exactly one number.
    """
    numbers = [int(part) for part in layer_name.split(".") if part.isdigit()]
    if len(numbers) != 1:
        raise LayoutMismatch(f"cache {layer_name!r}: expected one layer number in the name")
    return numbers[0]


def place_caches(caches: Mapping[str, torch.Tensor], host_layers: Iterable[str]) -> tuple[tuple[str, Region], ...]:
    """Say where each registered cache lies, in layer order, latents before index keys.

    Args:
        caches: vLLM's views ``[blocks, 1, tokens, elements]`` (or without the head dimension), any dtype.
        host_layers: names whose cache is a view of the host pool.

    Raises:
        LayoutMismatch: a cache is of no known kind or not in CPU memory, or the rows of its pages are not contiguous.
    """
    on_host = set(host_layers)
    named = []
    for name, tensor in caches.items():
        if tensor.device.type != "cpu":
            # A layer's hook fires when its kernels are queued, not when they have run: rows would be sent too early.
            raise LayoutMismatch(f"cache {name!r} is on {tensor.device}: TidalConnector serves CPU engines so far")
        view = tensor.squeeze(1) if tensor.dim() == 4 and tensor.shape[1] == 1 else tensor
        if view.dim() != 3 or view.stride(2) != 1 or view.stride(1) != view.shape[2]:
            raise LayoutMismatch(
                f"cache {name!r}: shape {tuple(tensor.shape)} stride {tensor.stride()}: expected "
                "contiguous rows within a page"
            )
        pages, tokens, elements = view.shape
        size = view.element_size()
        region = Region(
            kind=cache_kind(name),
            layer=layer_index(name),
            row_bytes=elements * size,
            home=Home.HOST if name in on_host else Home.DEVICE,
            base=view.data_ptr(),
            page_stride=view.stride(0) * size,
            page_tokens=tokens,
            pages=pages,
        )
        named.append((name, region))
    return tuple(sorted(named, key=lambda item: (item[1].layer, item[1].kind is RegionKind.INDEX)))


def model_layout(
    vllm_config: VllmConfig,
    caches: Mapping[str, torch.Tensor],
    placed: Iterable[tuple[str, Region]],
    weights: str,
) -> KVLayout:
    """Describe the model's KV for the handshake.

    Args:
        vllm_config: vLLM's configuration.
        caches: the registered caches.
        placed: their regions, from :func:`place_caches`.
        weights: the checkpoint's revision from the settings; empty takes :func:`checkpoint_digest`.
    """
    model = vllm_config.model_config
    text = model.hf_text_config
    specs = []
    for name, region in placed:
        dtype = str(caches[name].dtype).removeprefix("torch.")
        rope = (
            getattr(text, "qk_rope_head_dim", 0) * caches[name].element_size()
            if region.kind is RegionKind.LATENT
            else 0
        )
        specs.append(RegionSpec(region.kind, region.layer, region.row_bytes, dtype, dtype if rope else "", rope))
    leaders = sorted(spec.layer for spec in specs if spec.kind is RegionKind.INDEX)
    layers = sorted({spec.layer for spec in specs})
    rope_text = json.dumps({key: getattr(text, key, None) for key in _ROPE_KEYS}, sort_keys=True, default=str)
    lora = "lora" if vllm_config.lora_config is not None else ""
    return KVLayout(
        model=str(text.model_type),
        regions=tuple(specs),
        index_topk=getattr(text, "index_topk", 0) or 0,
        sharing=tuple(max((x for x in leaders if x <= layer), default=layer) for layer in layers) if leaders else (),
        rope=rope_text,
        weights=weights or checkpoint_digest(model.model),
        kv_dtype=str(vllm_config.cache_config.cache_dtype),
        salt=lora,
    )


def checkpoint_digest(model: str) -> str:
    """Digest a checkpoint cheaply: the configuration, and the size and both ends (64 KiB) of each weight
    file.

    A full digest of hundreds of gigabytes would take minutes at each start; two checkpoints that differ only
    in the middle of every file do not occur by accident. A model that is no local directory is known by its
    name.
    """
    root = Path(model)
    if not root.is_dir():
        return model
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(root.glob("config.json")) + sorted(root.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}:".encode())
        with path.open("rb") as file:
            digest.update(file.read(_SAMPLE))
            file.seek(max(0, size - _SAMPLE))
            digest.update(file.read(_SAMPLE))
    return digest.hexdigest()


def storages(caches: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Return (address, bytes) of each distinct memory that the caches are views of, so that each is
    registered once.
    """
    found = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in caches.values()}
    return sorted(found.items())


def placement_of(placed: Iterable[tuple[str, Region]]) -> Placement:
    """Return the regions alone, in order."""
    return Placement(tuple(region for _, region in placed))
