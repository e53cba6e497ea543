# SPDX-License-Identifier: Apache-2.0
"""The control channel between prefill and decode workers: messages, handshake, sessions, and the thread that drives
them.
"""
