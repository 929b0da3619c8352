"""Probes of machine, devices and packages."""
