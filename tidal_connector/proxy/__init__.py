# SPDX-License-Identifier: Apache-2.0
"""The OpenAI-compatible door in front of prefill and decode engines.

``settings`` says which engines there are, ``policy`` picks among them, ``legs`` writes the two requests,
``relay`` runs one client's request to its end, ``app`` holds the routes. Knows the engines only over HTTP.
"""
