"""Recipes and test cases: read, expanded, selected, checked."""
