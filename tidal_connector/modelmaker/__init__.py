# SPDX-License-Identifier: Apache-2.0
"""Small checkpoints that judge a KV path fairly: neither chaotic nor numb, and measured to be so.

``shape`` says what the model looks like, ``weights`` draws its tensors, ``tokenizer`` and ``checkpoint`` write the
files, ``report`` holds what was measured and the bounds, ``measure`` runs the measurement, ``api`` is the door.
"""
