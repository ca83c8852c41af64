"""Batch runs (`kvq run-batch`): answer a file of requests into a file of results, without a port."""
