"""Commands about this machine: doctor, completion."""
