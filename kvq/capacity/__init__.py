"""Above the engine: how many users fit, what tokens cost, and fleets under loads to come."""
