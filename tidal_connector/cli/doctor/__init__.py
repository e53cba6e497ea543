# SPDX-License-Identifier: Apache-2.0
"""``tidal doctor``: facts are gathered once, each check is a pure function over them, every finding brings its mend."""
