"""Running a model on its device: passes, captured graphs, transfers and memory."""
