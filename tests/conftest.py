"""Settings of every test run."""

from __future__ import annotations

import os

# Set before anything imports torch, and inherited by the programs that tests start. Tensors here are tiny: more
# threads only wait for each other, for minutes where the cores are busy.
os.environ.setdefault("OMP_NUM_THREADS", "1")
