"""Lossless speculative decoding of a target with a DSpark draft.

`round.py` holds the whole algorithm on one screen; sampling, verification and scheduling are pure functions beside it.
The door is `Engine`: `generate` and `stream` for one prompt, `submit` and `step` for many.
"""

from k3dspark.decoding.admission import Capacity
from k3dspark.decoding.calibration import Calibration, OnlineCalibration, Setting, read_calibration
from k3dspark.decoding.costs import StepCosts
from k3dspark.decoding.engine import Engine, Stream
from k3dspark.decoding.params import SamplingParams
from k3dspark.decoding.request import FinishReason, Progress, Request, Result, TokenLogprob
from k3dspark.decoding.schedule import CostAware, FixedLength, FullBlock, Load, Outcome, Scheduler, Threshold
from k3dspark.decoding.scheduler_for import Schedule, scheduler_for
from k3dspark.decoding.stats import DecodeStats

__all__ = [
    "Calibration",
    "Capacity",
    "CostAware",
    "DecodeStats",
    "Engine",
    "FinishReason",
    "FixedLength",
    "FullBlock",
    "Load",
    "OnlineCalibration",
    "Outcome",
    "Progress",
    "Request",
    "Result",
    "SamplingParams",
    "Schedule",
    "Scheduler",
    "Setting",
    "StepCosts",
    "Stream",
    "Threshold",
    "TokenLogprob",
    "read_calibration",
    "scheduler_for",
]
