"""Small modules that guess from the target's hidden states: each layout of checkpoints in a file of its own."""
