"""Commands about this machine: doctor and completion."""
