# SPDX-License-Identifier: Apache-2.0
"""``tidal plan``: what a model needs and where a machine's limits lie, before anything is bought or started."""
