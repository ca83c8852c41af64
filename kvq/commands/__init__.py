"""The commands behind `kvq`, one module each."""
