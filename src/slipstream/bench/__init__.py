"""Measuring: the same requests with and without speculation, and against peers, in one run on one machine."""
