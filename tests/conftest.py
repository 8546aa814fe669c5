"""What all tests share."""

from __future__ import annotations

from hypothesis import settings

# No deadlines: on a machine with two busy cores a test's time says nothing about the test.
settings.register_profile("flash-comm", deadline=None)
settings.load_profile("flash-comm")
