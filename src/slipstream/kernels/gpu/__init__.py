"""Triton kernels for NVIDIA GPUs. Each has a twin in torch, which says what it computes and runs elsewhere."""
