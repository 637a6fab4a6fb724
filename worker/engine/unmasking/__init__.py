"""Unmasking rules by name; a row's rule is chosen once, at admission."""

from __future__ import annotations

from contract.sampling import Rule
from worker.engine.unmasking.entropy_bound import EntropyBound
from worker.engine.unmasking.entropy_threshold import EntropyThreshold
from worker.engine.unmasking.factor import Factor
from worker.engine.unmasking.fixed_steps import FixedSteps
from worker.engine.unmasking.joint_threshold import JointThreshold
from worker.engine.unmasking.klass import Klass
from worker.engine.unmasking.left_to_right import LeftToRight
from worker.engine.unmasking.rule import UnmaskingRule
from worker.engine.unmasking.threshold import Threshold

RULES: dict[Rule, UnmaskingRule] = {
    "fixed_steps": FixedSteps(),
    "threshold": Threshold(),
    "left_to_right": LeftToRight(),
    "factor": Factor(),
    "entropy_bound": EntropyBound(),
    "entropy_threshold": EntropyThreshold(),
    "klass": Klass(),
    "joint_threshold": JointThreshold(),
}
DEFAULT_NUMBERS: dict[Rule, float] = {
    "factor": 1.0,
    "entropy_bound": 0.1,
    "entropy_threshold": 0.4,
    "klass": 0.9,
    "joint_threshold": 0.5,
}
"""The rules' numbers where the prompt names none; the others take the model's threshold."""
DEFAULT_BOUNDS: dict[Rule, float] = {"entropy_threshold": 0.02, "klass": 0.01, "joint_threshold": 0.9}
