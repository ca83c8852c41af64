"""Commands of `kvq`, one module each."""
