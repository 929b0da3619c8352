"""Code that runs inside a rank."""
