"""Batch runs (`kvq run-batch`): process a file of requests into a file of results, without a port."""
