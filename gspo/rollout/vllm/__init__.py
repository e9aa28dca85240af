"""The parts of engine `vllm`. Only `worker.py` and `in_process.py` import vLLM."""
