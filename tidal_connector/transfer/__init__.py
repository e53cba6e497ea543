# SPDX-License-Identifier: Apache-2.0
"""Moving bytes between processes: runs of addresses, and the planes that carry them."""
