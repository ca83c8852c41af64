"""Commands for capacity: plan, simulate, cost, models and gpus."""
