# SPDX-License-Identifier: Apache-2.0
"""The proxy's built-in page: ``/dashboard`` and the data behind it.

``readings`` understands an engine's ``/metrics``, ``history`` keeps a bounded past, ``findings`` says what is wrong,
``sampler`` looks at proxy and engines again and again, ``answer`` is what the page is told, ``page`` joins the files of
``static/`` into one self-contained HTML text, ``routes`` serves both. Nothing here is in the way of a request.
"""
