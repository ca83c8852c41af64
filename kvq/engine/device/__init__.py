"""Model execution on a device: passes, captured graphs, transfers and memory."""
