# SPDX-License-Identifier: Apache-2.0
"""The OpenAI-compatible door in front of prefill and decode engines.

``settings`` says which engines there are, ``survey`` asks them who they are, ``pairing`` says which do not fit,
``policy`` picks among the others, ``legs`` writes the two requests, ``relay`` runs one client's request to its end,
``app`` holds the routes. Requests go over HTTP; only the survey speaks to the engines' control channels.
"""
