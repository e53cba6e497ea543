# SPDX-License-Identifier: Apache-2.0
"""Everything that touches vLLM: the connector, the plugins' entry points, and one folder per host backend.

Importing this package imports nothing of vLLM; its modules do, one by one, when vLLM asks for them by name.
"""
