"""Tests that run again after each edit, off a process that has loaded torch."""
