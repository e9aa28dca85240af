"""The parts of the local engine: sampling, KV cache state, and on a GPU a paged KV cache, CUDA graphs and fused kernels."""
