"""Experiment loggers: what is logged once arrives in every tool."""

from .base import ExperimentLogger, Histogram, Run, Unavailable
from .tracker import Tracker

__all__ = ["ExperimentLogger", "Histogram", "Run", "Tracker", "Unavailable"]
