# SPDX-License-Identifier: Apache-2.0
"""What is added to vllm-ascend's platform: our worker where the latents live in the host pool, our attention backend in
it, and a refusal at start of what cannot work together.

The functions here make replacements out of the host's own ones (see :mod:`.patches`). They are called while vLLM builds
its configuration, in the front end, and again for each attention layer in the worker.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tidal_connector.errors import ConfigError
from tidal_connector.vllm_plugin import front_door
from tidal_connector.vllm_plugin.ascend import host
from tidal_connector.vllm_plugin.offload_plan import adopt_switch, resolve
from tidal_connector.vllm_plugin.plugins import CONNECTOR
from tidal_connector.vllm_plugin.translate import engine_facts

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_FOLDER = "tidal_connector.vllm_plugin.ascend"
STOCK_WORKER = "vllm_ascend.worker.worker.NPUWorker"
WORKER = f"{_FOLDER}.worker.TidalNpuWorker"
STOCK_BACKEND = "vllm_ascend.attention.sfa_v1.AscendSFABackend"
BACKEND = f"{_FOLDER}.backend.TidalSFABackend"

_RENAMED = "_engine_id_patched"
_FACTS = "tidal_facts"  # vLLM asks the class, not an object, about each request

BLOCK_SIZE = 128
"""Tokens of a block: vllm-ascend's kernels know no other, and the host pool's pages are blocks."""

TOP_K = 2048
"""What vllm-ascend's indexer selects, whatever the model's ``index_topk`` says."""


def configuring(stock: Callable[[type, VllmConfig], None]) -> Callable[[type, VllmConfig], None]:
    """Make ``NPUPlatform.check_and_update_config`` out of the stock one: with offload, our worker is chosen.

    With our connector, offload or not, the engine also keeps the id that its operator gave it, and the front end learns
    which requests it can serve. Without our connector the stock rules apply, and nothing else.
    """

    @functools.wraps(stock)
    def check_and_update_config(cls: type, vllm_config: VllmConfig) -> None:
        if vllm_config.parallel_config.worker_cls == WORKER:
            # A copy of a configuration that was decided on, such as a draft model's: its model may select nothing.
            stock(cls, vllm_config)
            return
        adopt_switch(vllm_config)
        transfer = vllm_config.kv_transfer_config
        ours = transfer is not None and transfer.kv_connector == CONNECTOR
        offloads = ours and vllm_config.model_config is not None and resolve(vllm_config) is not None
        if offloads:
            host.check_versions()
        if ours:
            # The stock rules append a random suffix once, and note so here: nobody could name the engine any more.
            setattr(transfer, _RENAMED, True)
        stock(cls, vllm_config)
        if offloads:
            refuse(vllm_config)
            vllm_config.parallel_config.worker_cls = WORKER
        if ours:
            setattr(cls, _FACTS, engine_facts(vllm_config))

    return check_and_update_config


def admitting(stock: Callable[[type, Any, Any], None]) -> Callable[[type, Any, Any], None]:
    """Make ``NPUPlatform.validate_request`` out of the stock one: a request whose ``kv_transfer_params`` this engine
    cannot use is refused with HTTP 400. Engines without our connector are left alone.
    """

    @functools.wraps(stock)
    def validate_request(cls: type, processed_inputs: Any, params: Any) -> None:
        stock(cls, processed_inputs, params)
        facts = vars(cls).get(_FACTS)
        if facts is not None:
            front_door.check_request(facts, params)

    return validate_request


def choosing_backend(stock: Callable[..., str]) -> Callable[..., str]:
    """Make ``NPUPlatform.get_attn_backend_cls`` out of the stock one: ours takes the place of the sparse backend.

    Applied in workers with offload only.
    """

    @functools.wraps(stock)
    def get_attn_backend_cls(
        cls: type, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        chosen = stock(cls, selected_backend, attn_selector_config, num_heads)
        return BACKEND if chosen == STOCK_BACKEND else chosen

    return get_attn_backend_cls


def refuse(vllm_config: VllmConfig) -> None:
    """Refuse settings with which latents in the host pool cannot work.

    Args:
        vllm_config: the configuration after the stock rules.

    Raises:
        ConfigError: the first that was found, and what to set instead.
    """
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    top_k, given, worker = int(model.hf_config.index_topk), vllm_config.additional_config, parallel.worker_cls
    additional = given if isinstance(given, dict) else {}
    if worker != STOCK_WORKER:
        raise ConfigError(
            f"worker_cls = {worker}: offload has a worker of its own, made out of {STOCK_WORKER}; drop it"
        )
    if vllm_config.cache_config.block_size != BLOCK_SIZE:
        raise ConfigError(
            f"--block-size {vllm_config.cache_config.block_size}: offload on Ascend needs blocks of {BLOCK_SIZE} "
            f"tokens; set --block-size {BLOCK_SIZE}"
        )
    if top_k != TOP_K:
        raise ConfigError(
            f'index_topk = {top_k}: {host.HOST} selects {TOP_K} positions whatever the model says; set "offload": "off"'
        )
    if parallel.nnodes_within_dp > 1:
        raise ConfigError(
            f"tensor_parallel_size = {parallel.tensor_parallel_size} over {parallel.nnodes_within_dp} machines: the "
            "ranks of an engine share one host pool; keep them on one machine"
        )
    if model.enable_sleep_mode:
        raise ConfigError('--enable-sleep-mode: the host pool does not sleep; drop it, or set "offload": "off"')
    for name in ("enable_sparse_sfa_c8", "enable_dsa_cp"):
        if additional.get(name, False):
            raise ConfigError(
                f"additional_config: {name} changes how latents are kept, which offload does not know; drop it, or set "
                '"offload": "off"'
            )
