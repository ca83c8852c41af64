"""Causes of prefix misses: where a prompt left what is cached, and why. No torch, no clock."""

from kvq.blockmgr.misses.memory import Misses
from kvq.blockmgr.misses.miss import CAUSES, OFF, Cause, PrefixMiss

__all__ = ["CAUSES", "OFF", "Cause", "Misses", "PrefixMiss"]
