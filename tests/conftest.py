"""Settings of every test run."""

from __future__ import annotations

import os

# Set before anything imports torch, and inherited by the programs that tests start. Tensors here are tiny: more
# threads only wait for each other, for minutes where the cores are busy.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import HealthCheck, settings

# No test asserts speed: a busy machine must not fail one. Hypothesis tries the same examples in every run, so that one
# commit has one verdict; `HYPOTHESIS_PROFILE=explore make test` looks for new ones.
_PATIENT = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("patient", derandomize=True, **_PATIENT)
settings.register_profile("explore", **_PATIENT)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "patient"))
