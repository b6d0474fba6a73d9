"""Planted faults: proof that the tests would notice. ``make test-faults`` runs them.

A test that never failed proves nothing. Here each rule is broken once, in a copy of the checkout,
and the tests that ought to see it have to go red.
"""
