"""Gangs of ranks: specification, lifecycle, schedule, merged outcomes."""
