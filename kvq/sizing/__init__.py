"""What a model takes, as the engine lays it out: parameters, types of weights, memory, pools of blocks."""
