"""The router: the fronts and the gateway of a server, with workers in place of the engine."""
