# SPDX-License-Identifier: Apache-2.0
"""``python -m tidal_connector.cli``: the ``tidal`` command where the script is not on the path."""

from tidal_connector.cli.start import main

main()
