"""What a model is: loading, adapters, quantization, LM head, routing, kernels. Shared by the engines and the learner."""
