# SPDX-License-Identifier: Apache-2.0
"""``tidal selftest npu``: what simulations and stand-ins proved elsewhere, run again on the device of this machine.

``device`` is all that is asked of a device, ``npu`` the real one. ``sequences`` draws calls of the operators (pure),
``operators`` compares them with the reference, ``bandwidth`` times the gather from the pool, ``answers`` compares an
engine with the pool and one without. ``worker`` bounds every wait, ``report`` shows it, ``run`` is the order of things.
"""
