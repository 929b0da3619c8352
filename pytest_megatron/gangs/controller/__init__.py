"""Distributed tests on gangs."""
