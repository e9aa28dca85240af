"""Decoding on a GPU: keys and values in pages, one captured graph per batch size, fused small kernels."""
