"""Files of requests, answered into files: `kvq run-batch`, without a port."""
