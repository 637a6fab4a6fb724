"""Unmasking rules by name; a row's rule is chosen once, at admission."""

from __future__ import annotations

from contract.sampling import Rule
from worker.engine.unmasking.entropy_bound import EntropyBound
from worker.engine.unmasking.fixed_steps import FixedSteps
from worker.engine.unmasking.left_to_right import LeftToRight
from worker.engine.unmasking.rule import UnmaskingRule
from worker.engine.unmasking.threshold import Threshold

RULES: dict[Rule, UnmaskingRule] = {
    "fixed_steps": FixedSteps(),
    "threshold": Threshold(),
    "left_to_right": LeftToRight(),
    "entropy_bound": EntropyBound(),
}
DEFAULT_ENTROPY_BOUND = 0.1
