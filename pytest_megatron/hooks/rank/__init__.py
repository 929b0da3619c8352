"""The pytest session inside a rank."""
