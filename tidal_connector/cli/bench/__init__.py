# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: each states what ran, on which machine, beside what, and gives ratios taken within one run."""
