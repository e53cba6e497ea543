# SPDX-License-Identifier: Apache-2.0
"""Rooms 5 to 7 of the walk: choose which rows attention needs, fetch them, hold them where attention reads."""
