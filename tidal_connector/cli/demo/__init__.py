# SPDX-License-Identifier: Apache-2.0
"""``tidal demo``: two engines and a proxy, every answer compared with a plain engine.

``prompts`` says what is asked, ``client`` asks, ``compare`` judges (pure), ``expect`` computes from the checkpoint what
must have moved (pure), ``report`` shows it, ``run`` is the order of things.
"""
