# SPDX-License-Identifier: Apache-2.0
"""The prefill room: what was written, what was asked for, and the pushes that follow from both."""
