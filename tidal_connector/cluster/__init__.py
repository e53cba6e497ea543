# SPDX-License-Identifier: Apache-2.0
"""Engines and proxies as processes: how they are configured, started, watched and ended."""
