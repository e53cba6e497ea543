# SPDX-License-Identifier: Apache-2.0
"""The only reader of vLLM's configuration: it becomes frozen values of ours, once, at start.

The layout of a model comes from its configuration and the caches that vLLM registered; where a cache lies
comes from its tensor. A cache that is neither a latent nor an index-key cache is refused at start, because
leaving one out would go unnoticed until the output is wrong.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from tidal_connector.config import TidalConfig, load_config, with_aliases
from tidal_connector.errors import ConfigError, LayoutMismatch
from tidal_connector.ids import EngineId
from tidal_connector.layout import Home, KVLayout, Placement, Region, RegionKind, RegionSpec
from tidal_connector.log import get_logger

if TYPE_CHECKING:
    import torch
    from vllm.config import KVTransferConfig, VllmConfig

    # What vLLM registers for a layer name: one tensor, or on vllm-ascend a tuple of them.
    Cache = torch.Tensor | Sequence[torch.Tensor]

logger = get_logger(__name__)

INDEX_CACHE_SUFFIX = ".indexer.k_cache"
DEVICES = ("cpu", "npu")
_PACKED_DTYPES = ("int8", "float8_e4m3fn", "float8_e5m2")
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
        replica: which data-parallel replica of this machine it is; each is an engine of its own, with ports of its own.
    """

    engine: EngineId
    config: TidalConfig
    producer: bool
    consumer: bool
    offload: bool
    block_size: int
    recompute: bool
    ranks: int = 1
    replica: int = 0


def settings(vllm_config: VllmConfig) -> TidalConfig:
    """Read the connector's settings: ``kv_connector_extra_config``, and the variables that stand in for it.

    Raises:
        ConfigError: there is no KV-transfer configuration, or a setting is wrong.
    """
    return load_config(with_aliases(_transfer(vllm_config).kv_connector_extra_config)[0])


def _transfer(vllm_config: VllmConfig) -> KVTransferConfig:
    if vllm_config.kv_transfer_config is None:
        raise ConfigError("TidalConnector needs --kv-transfer-config")
    return vllm_config.kv_transfer_config


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
    config, transfer = settings(vllm_config), _transfer(vllm_config)
    role = str(transfer.kv_role)  # vLLM takes no connector without a role
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
    consumer = role in ("kv_consumer", "kv_both")
    offload = config.offloads(role)
    if offload and role == "kv_producer":
        raise ConfigError(
            'offload = "on" with kv_role kv_producer: prefill keeps its latents on the device; '
            "use kv_consumer or kv_both"
        )
    return EngineFacts(
        engine=EngineId(str(transfer.engine_id)),
        config=config,
        producer=role in ("kv_producer", "kv_both"),
        consumer=consumer,
        offload=offload,
        block_size=vllm_config.cache_config.block_size,
        recompute=transfer.kv_load_failure_policy == "recompute",
        ranks=vars(parallel).get("tensor_parallel_size", 1),
        replica=vars(parallel).get("data_parallel_rank_local") or 0,
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


def cache_parts(name: str, cache: Cache) -> tuple[tuple[RegionKind, torch.Tensor], ...]:
    """Tell what each tensor of a registered cache holds.

    vLLM registers one tensor per layer name; vllm-ascend registers a tuple for a layer: its latents without rope, the
    rope, and, where the layer has an indexer, index keys, and their scales where these are quantised. Quantised latents
    are packed into one tensor.

    Raises:
        LayoutMismatch: it is neither a latent nor an index-key cache, or a tuple of a length that has no meaning.
    """
    kind = cache_kind(name)
    if not isinstance(cache, tuple | list):
        return ((kind, cast("torch.Tensor", cache)),)
    dtype = str(cache[0].dtype).removeprefix("torch.") if cache else ""
    latents = (RegionKind.LATENT,) if dtype in _PACKED_DTYPES else (RegionKind.LATENT_NOPE, RegionKind.LATENT_ROPE)
    kinds = (*latents, RegionKind.INDEX, RegionKind.INDEX_SCALE)
    if not kind.latent or not len(latents) <= len(cache) <= len(kinds):
        raise LayoutMismatch(
            f"cache {name!r}: {len(cache)} tensors, the first of dtype {dtype}: expected {len(latents)} of latents, "
            "then at most index keys and their scales"
        )
    return tuple(zip(kinds, cache, strict=False))


def place_caches(
    caches: Mapping[str, Cache], host_layers: Iterable[str], addresses: Mapping[str, Sequence[int]] | None = None
) -> tuple[tuple[str, Region], ...]:
    """Say where each registered cache lies, in layer order, latents before index keys.

    Args:
        caches: vLLM's views ``[blocks, 1, tokens, elements]``, or ``[blocks, tokens, 1, elements]``, or without a head
            dimension, any dtype; or a tuple of them per layer (see :func:`cache_parts`).
        host_layers: names whose latents are views of the host pool.
        addresses: for names whose latents are views of the pool through a device's alias: the addresses in host memory,
            in the order of the tuple, since those of the tensors mean nothing outside the device.

    Raises:
        LayoutMismatch: a cache is of no known kind or in memory that we do not serve, or the rows of its pages are not
            contiguous.
    """
    on_host, known = set(host_layers), addresses or {}
    named = []
    for name, cache in caches.items():
        for at, (kind, tensor) in enumerate(cache_parts(name, cache)):
            hosted = kind.latent and name in on_host
            base = known[name][at] if hosted and name in known else tensor.data_ptr()
            named.append((name, _region(name, kind, tensor, Home.HOST if hosted else Home.DEVICE, base)))
    order = list(RegionKind)
    return tuple(sorted(named, key=lambda item: (item[1].layer, order.index(item[1].kind))))


def _region(name: str, kind: RegionKind, tensor: torch.Tensor, home: Home, base: int) -> Region:
    if tensor.device.type not in DEVICES:
        # A layer's hook fires when its kernels are queued, not when they have run; elsewhere we know of no event to
        # wait for, and rows would be sent too early.
        raise LayoutMismatch(
            f"cache {name!r} is on {tensor.device}: TidalConnector serves CPU engines and NPUs; use one of them"
        )
    view = tensor
    if tensor.dim() == 4 and 1 in (tensor.shape[1], tensor.shape[2]):
        view = tensor.squeeze(1 if tensor.shape[1] == 1 else 2)
    if view.dim() != 3 or view.stride(2) != 1 or view.stride(1) != view.shape[2]:
        raise LayoutMismatch(
            f"cache {name!r}: shape {tuple(tensor.shape)} stride {tensor.stride()}: expected "
            "contiguous rows within a page"
        )
    pages, tokens, elements = view.shape
    size = view.element_size()
    return Region(
        kind=kind,
        layer=layer_index(name),
        row_bytes=elements * size,
        home=home,
        base=base,
        page_stride=view.stride(0) * size,
        page_tokens=tokens,
        pages=pages,
    )


def model_layout(
    vllm_config: VllmConfig,
    caches: Mapping[str, Cache],
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
        tensor = dict(cache_parts(name, caches[name]))[region.kind]
        dtype = str(tensor.dtype).removeprefix("torch.")
        rope = region.row_bytes if region.kind is RegionKind.LATENT_ROPE else 0
        if region.kind is RegionKind.LATENT:
            rope = getattr(text, "qk_rope_head_dim", 0) * tensor.element_size()
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


def storages(caches: Mapping[str, Any], host_layers: Iterable[str] = ()) -> list[tuple[int, int]]:
    """Return (address, bytes) of each distinct memory that the caches are views of, so that each is registered once.

    Args:
        caches: the registered caches.
        host_layers: names whose latents are left out: they lie in the host pool, and what a device calls their address
            is none that a network card could use.
    """
    on_host = set(host_layers)
    found: dict[int, tuple[int, int]] = {}
    for name, cache in caches.items():
        for kind, tensor in cache_parts(name, cache):
            if kind.latent and name in on_host:
                continue
            start, key = tensor.data_ptr(), tensor.untyped_storage().data_ptr()
            end = start + (1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))) * (
                tensor.element_size()
            )
            low, high = found.get(key, (start, end))
            found[key] = (min(low, start), max(high, end))
    return sorted((low, high - low) for low, high in found.values())


def placement_of(placed: Iterable[tuple[str, Region]]) -> Placement:
    """Return the regions alone, in order."""
    return Placement(tuple(region for _, region in placed))
