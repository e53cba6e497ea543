# SPDX-License-Identifier: Apache-2.0
"""Who is in the cluster: engines announce themselves, proxies and agents watch. ``base`` says what each promises."""
