# SPDX-License-Identifier: Apache-2.0
"""The OpenAI-compatible door in front of prefill and decode engines.

``settings`` and the registry (by ``watching``) say which engines there are, ``roster`` holds them; ``survey`` asks them
who they are, ``pairing`` says which do not fit, ``policy`` and ``picker`` choose among the others; ``gate`` bounds how
many requests run and wait; ``legs`` writes the two requests, ``attempt`` dispatches them over ``wire``, ``relay`` runs
one client's request to its end; ``meters``, ``looks`` and ``health`` tell about it; ``app`` holds the routes. Requests
go over HTTP; only the survey speaks to the engines' control channels. README.md is for operators.
"""
