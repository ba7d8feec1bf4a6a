"""Settings of every test run."""

from __future__ import annotations

import os

# Set before anything imports torch, and inherited by the programs that tests start. Tensors here are tiny: more
# threads only wait for each other, for minutes where the cores are busy.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import HealthCheck, settings

# No test asserts speed: a busy machine must not fail one.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")
