"""What a model is: loading, adapters, quantization, LM head, routing, kernels. Engines and learner share it."""
