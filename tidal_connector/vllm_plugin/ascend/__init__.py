# SPDX-License-Identifier: Apache-2.0
"""DeepSeek sparse attention on vllm-ascend 0.23.0.post1 with the latents in the host pool.

vLLM's KV tuple of a layer stays what vllm-ascend makes of it; its latents are tensors over the device's alias of the
host pool, so that stock code for prefill, recomputation and mixed batches runs unchanged. Steps that only decode
attend from the selection cache.

Graphs: all that is decided on the host is decided before a pass (``EngineSelection.arm``), buffers are at fixed
addresses, and the side stream's events are recorded and waited for within the pass; so FULL_DECODE_ONLY,
FULL_AND_PIECEWISE, PIECEWISE and eager mode are served alike, and sparse attention has no parameters that a replay
would have to update.

Nothing here is imported before the plugin entry has found vllm-ascend in charge (see ``vllm_plugin.plugins``).
"""
