# SPDX-License-Identifier: Apache-2.0
"""The ``tidal`` command. Each command imports what it needs when it runs, so that ``tidal --help`` is
quick."""
