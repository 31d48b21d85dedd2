"""Scheduling decisions as pure functions of a view of the state: the engine acts on them, a simulator may too."""
