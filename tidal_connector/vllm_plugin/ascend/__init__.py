# SPDX-License-Identifier: Apache-2.0
"""DeepSeek sparse attention on vllm-ascend 0.23.0.post1 with the latents in the host pool.

vLLM's KV tuple of a layer stays what vllm-ascend makes of it; its latents are tensors over the device's alias of the
host pool, so that stock code for prefill, recomputation and mixed batches runs unchanged. Steps that only decode
attend from the selection cache.

Nothing here is imported before the plugin entry has found vllm-ascend in charge (see ``vllm_plugin.plugins``).
"""
