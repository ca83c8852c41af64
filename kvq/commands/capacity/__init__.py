"""Commands that size: plan, simulate, cost, models, gpus."""
