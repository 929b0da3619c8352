"""Golden values: model, policy, store, provenance."""
