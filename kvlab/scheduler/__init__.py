"""Chapter 06: many requests on one model. What each step computes, who waits, who yields, and how long it all takes.

``_request`` is one request and how far it has come, ``_queues`` who is next, ``_step`` what one pass computes,
``_scheduler`` the decisions, ``_engine`` the loop around a model, ``_metrics`` what came of it, ``_costs`` how long a
step takes, and ``_simulate`` the loop without a model.
"""

from __future__ import annotations

from kvlab.scheduler._costs import CostModel, FittedCost, RooflineCost, StepShape, fit, fit_records
from kvlab.scheduler._engine import forward, serve
from kvlab.scheduler._metrics import Metrics, Served, table
from kvlab.scheduler._queues import FairQueue, FirstCome
from kvlab.scheduler._request import Request
from kvlab.scheduler._scheduler import POLICIES, Scheduler
from kvlab.scheduler._simulate import Places, simulate
from kvlab.scheduler._step import Step

__all__ = [
    "POLICIES",
    "CostModel",
    "FairQueue",
    "FirstCome",
    "FittedCost",
    "Metrics",
    "Places",
    "Request",
    "RooflineCost",
    "Scheduler",
    "Served",
    "Step",
    "StepShape",
    "fit",
    "fit_records",
    "forward",
    "serve",
    "simulate",
    "table",
]
