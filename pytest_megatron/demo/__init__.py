"""A small project to try everything on."""
