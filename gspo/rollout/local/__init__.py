"""The parts of the local engine: queue, sampling, KV cache state, and on a GPU a paged KV cache and CUDA graphs."""
