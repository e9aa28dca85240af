"""What engine `vllm` is made of. vLLM itself is imported in `worker.py` and `in_process.py` alone."""
