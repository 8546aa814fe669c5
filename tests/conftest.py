"""What all tests share."""

from __future__ import annotations

import os

from hypothesis import settings

# No deadlines: on a machine with two busy cores a test's time says nothing about the test.
settings.register_profile("flash-comm", deadline=None)
settings.load_profile("flash-comm")

os.environ["FCOMM_MODEL"] = "seed"  # a test does not depend on what was calibrated on the machine
