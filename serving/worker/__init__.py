"""A worker process: an engine of one role behind a control port, for routers and for other workers."""
