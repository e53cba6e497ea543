# SPDX-License-Identifier: Apache-2.0
"""The decode room: reservations of pages, and what may be said about them and when."""
