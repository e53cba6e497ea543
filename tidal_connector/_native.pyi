# SPDX-License-Identifier: Apache-2.0
"""Types of the native module; csrc/binding.cpp is its source."""

def version() -> str: ...
