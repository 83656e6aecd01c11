"""Compiled code for CPUs: the whole decoding pass, and products with fixed weights."""
