# SPDX-License-Identifier: Apache-2.0
"""Every function of vllm-ascend and vLLM that offload on Ascend replaces, overrides or leans on, with why, what and how
to verify it.

None of them is a published extension point. Each entry names the signature that we were written for; where the host's
differs, :func:`check` raises at start instead of running on a guess, and the contract tests fail first.
"""

from __future__ import annotations

from tidal_connector.vllm_plugin.ascend import platform
from tidal_connector.vllm_plugin.ascend.host import HOST
from tidal_connector.vllm_plugin.patching import Patch, Seam

CONFIGURATION = Patch(
    name="ascend-configuration",
    why="vllm-ascend sets its own worker, whose model runner keeps the latents on the device; there is no option for "
    "another one that is applied after its other rules.",
    what="Runs the stock rules; for an engine whose latents live in the host pool it then refuses what cannot work "
    "with that, and names our worker. Without offload it does nothing else.",
    verify="tests/vllm_plugin/ascend: the worker's class with and without offload; without the patch the connector "
    "refuses to start with offload on, because nobody gave it a pool.",
    module="vllm_ascend.platform",
    owner="NPUPlatform",
    attribute="check_and_update_config",
    parameters=("cls", "vllm_config"),
    replacement=platform.configuring,
    wraps=True,
    host=HOST,
)

FRONT_DOOR = Patch(
    name="ascend-front-door",
    why="vLLM hands a request with unusable transfer parameters to the engine, which could only fail it late.",
    what="Refuses it in the front end with one clear line, which its client gets with HTTP 400.",
    verify="tests/vllm_plugin/ascend: parameters of the wrong form, with and without our connector.",
    module="vllm_ascend.platform",
    owner="NPUPlatform",
    attribute="validate_request",
    parameters=("cls", "processed_inputs", "params"),
    replacement=platform.admitting,
    wraps=True,
    host=HOST,
)

BACKEND = Patch(
    name="ascend-attention-backend",
    why="vllm-ascend picks attention backends from a fixed table and has no hook for another one.",
    what="In a worker with offload, our subclass takes the place of the sparse backend; others stay.",
    verify="tests/vllm_plugin/ascend: the class of a layer's attention; without the patch the start fails with "
    "'in place of our attention'.",
    module="vllm_ascend.platform",
    owner="NPUPlatform",
    attribute="get_attn_backend_cls",
    parameters=("cls", "selected_backend", "attn_selector_config", "num_heads"),
    replacement=platform.choosing_backend,
    wraps=True,
    host=HOST,
)

PATCHES = (CONFIGURATION, FRONT_DOOR, BACKEND)

_RUNNER = "vllm_ascend.worker.model_runner_v1"
_WORKER = "vllm_ascend.worker.worker"
_SFA = "vllm_ascend.attention.sfa_v1"
_VERIFY = "tests/vllm_plugin/ascend compare a patched run with a stock one and with dense attention."


def _seam(name: str, module: str, owner: str, attribute: str, parameters: str, why: str, what: str) -> Seam:
    return Seam(name, why, what, _VERIFY, module, owner, attribute, tuple(parameters.split()), host=HOST)


SEAMS = (
    _seam(
        "worker-device",
        _WORKER,
        "NPUWorker",
        "init_device",
        "self",
        "It builds the model runner from a name of its module.",
        "Calls it while that name means our model runner.",
    ),
    _seam(
        "worker-memory",
        _WORKER,
        "NPUWorker",
        "determine_available_memory",
        "self",
        "vLLM divides what it returns into blocks that hold latents.",
        "Divides the device's budget without latents, and returns the size of so many whole blocks.",
    ),
    _seam(
        "runner-start",
        _RUNNER,
        "NPUModelRunner",
        "__init__",
        "self vllm_config device",
        "The runner has to know that it has no caches yet.",
        "Calls it, then adds our own fields.",
    ),
    _seam(
        "runner-allocation",
        _RUNNER,
        "NPUModelRunner",
        "_allocate_kv_cache_tensors",
        "self kv_cache_config",
        "It allocates all parts of a layer's cache on the device.",
        "Returns parts of the pool for the latents, in the tuple that the stock code reshapes.",
    ),
    _seam(
        "runner-raw-tensor",
        _RUNNER,
        "NPUModelRunner",
        "_allocate_int8_cache_tensor",
        "self numel alignment",
        "Device tensors begin where vllm-ascend lets them begin for transfers.",
        "Calls it for index keys.",
    ),
    _seam(
        "runner-scaled-index",
        _RUNNER,
        "NPUModelRunner",
        "_allocate_sparse_c8_indexer_tensors",
        "self dsa_k_tensor_size dsa_k_scale_tensor_size alignment scale_dtype",
        "Quantised index keys and their scales share one piece of device memory.",
        "Calls it for quantised index keys.",
    ),
    _seam(
        "runner-caches",
        _RUNNER,
        "NPUModelRunner",
        "initialize_kv_cache_tensors",
        "self kv_cache_config",
        "The connector has to know the pool before vLLM registers the caches with it.",
        "Hands the pool over after the stock code has bound the caches.",
    ),
    _seam(
        "runner-requests",
        _RUNNER,
        "NPUModelRunner",
        "_update_states",
        "self scheduler_output",
        "Seats of requests that ended have to be free before others ask for them.",
        "Tells the selection cache first, then calls the stock function.",
    ),
    _seam(
        "runner-metadata",
        _RUNNER,
        "NPUModelRunner",
        "_build_attention_metadata",
        "self num_tokens num_reqs max_query_len num_tokens_padded num_reqs_padded ubatch_slices logits_indices "
        "use_spec_decode for_cudagraph_capture num_scheduled_tokens num_scheduled_tokens_np cascade_attn_prefix_lens",
        "It is the last that runs before a forward pass or the replay of a graph, with the padded size of the batch.",
        "Seats the requests of the pass after the stock function has run.",
    ),
    _seam(
        "runner-specs",
        _RUNNER,
        "NPUModelRunner",
        "get_kv_cache_spec",
        "self",
        "What it says of a layer is what we divide into pool and device.",
        "Reads its result; nothing else.",
    ),
    _seam(
        "runner-shapes",
        _RUNNER,
        "NPUModelRunner",
        "_reshape_kv_cache_tensors",
        "self kv_cache_config kv_cache_raw_tensors",
        "It makes a layer's tuple out of raw tensors, and takes them in the order in which we hand them out.",
        "Lets it work on parts of the pool.",
    ),
    _seam(
        "attention-class",
        _SFA,
        "AscendSFABackend",
        "get_impl_cls",
        "",
        "vLLM asks the backend for the class of a layer's attention.",
        "Our backend names ours; the stock choices for context parallelism are refused before.",
    ),
    _seam(
        "attention-order",
        _SFA,
        "AscendSFAImpl",
        "forward",
        "self layer_name hidden_states kv_cache attn_metadata need_gather_q_kv output",
        "A step's own rows have to be in the pool, and the selection made, before attention runs, which is last.",
        "Nothing: it is the stock function that calls what we override, in that order.",
    ),
    _seam(
        "attention",
        _SFA,
        "AscendSFAImpl",
        "_execute_sparse_flash_attention_process",
        "self ql_nope q_pe kv_cache topk_indices attn_metadata actual_seq_lengths_query actual_seq_lengths_key",
        "It attends from the layer's cache, which is in host memory.",
        "Attends from the selection cache where the pass is served from there.",
    ),
    _seam(
        "attention-query",
        _SFA,
        "AscendSFAImpl",
        "_q_proj_and_k_up_proj",
        "self x",
        "It runs before the selection is known, with nothing to hide.",
        "Puts it off, in layers that select for themselves, until the missing rows are on their way.",
    ),
    _seam(
        "attention-query-rope",
        _SFA,
        "AscendSFAImpl",
        "rope_single",
        "self x cos sin",
        "It rotates the result of the projection that was put off.",
        "Is put off with it.",
    ),
    _seam(
        "attention-kernel",
        "vllm_ascend.device.device_op",
        "BaseDeviceAdaptor",
        "execute_sparse_flash_attention_process",
        "cls sfa_impl ql_nope q_pe kv_cache topk_indices attn_metadata actual_seq_lengths_query actual_seq_lengths_key "
        "block_table sparse_mode return_lse",
        "It calls the attention kernel of the chip at hand.",
        "Is called with the arena in place of the cache, slots in place of positions, and sparse_mode 0.",
    ),
    _seam(
        "graph-parameters",
        _SFA,
        "AscendSFAImpl",
        "update_graph_params",
        "update_stream forward_context num_tokens vllm_config speculative_config num_dcp_pcp_tokens "
        "draft_attn_metadatas",
        "A captured graph would keep parameters that sparse attention had on the host.",
        "Nothing: sparse attention has none, and all of ours are in buffers at fixed addresses.",
    ),
    _seam(
        "cache-written",
        "vllm_ascend.attention.utils",
        "",
        "notify_kv_cache_written",
        "layer_name",
        "It is called right after a layer's rows of a step were written, the earliest moment at which they can go.",
        "The connector's on_kv_cache_written records an event there.",
    ),
)


def check() -> None:
    """Compare the host with all that we were written for; changes nothing.

    Raises:
        HostChanged: the first that differs.
    """
    for patch in PATCHES:
        if not patch.applied():
            patch.check()
    for seam in SEAMS:
        seam.check()


def apply_everywhere() -> None:
    """Apply what every process of an engine needs; safe to call again.

    Raises:
        HostChanged: the host is not what the patch was written for.
    """
    FRONT_DOOR.apply()
    CONFIGURATION.apply()


def apply_in_worker() -> None:
    """Check the host, and apply what a worker with offload needs; safe to call again.

    Raises:
        HostChanged: the host is not what we were written for.
    """
    check()
    BACKEND.apply()
