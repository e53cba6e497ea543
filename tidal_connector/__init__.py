# SPDX-License-Identifier: Apache-2.0
"""tidal_connector: a vLLM KV connector for DeepSeek sparse attention.

Importing the package loads nothing but this version: no torch, no vllm, no native code.
"""

from __future__ import annotations

__version__ = "0.1.0"
