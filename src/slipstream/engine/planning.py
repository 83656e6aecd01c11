"""From an engine's configuration to its planner."""

from __future__ import annotations

from slipstream.engine.config import EngineConfig
from slipstream.plan.adaptive import AdaptivePlanner
from slipstream.plan.cost import PassCost
from slipstream.plan.planner import Planner

ROW_SLOPE = {"cpu": 0.15, "cuda": 0.001}
"""What one more row adds to a pass, as a part of the first one, until the engine has seen its own passes."""


def make_planner(config: EngineConfig, device: str) -> Planner:
    """For a device of this type."""
    if config.planner == "fixed":
        return Planner()
    planner = AdaptivePlanner(PassCost(ROW_SLOPE[device]), min_gain=config.min_gain)
    planner.limit_rows(config.draft_rows)
    return planner
