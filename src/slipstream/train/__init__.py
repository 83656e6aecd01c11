"""Training drafters for a target, on answers of the target itself. See `docs/training.md`."""
