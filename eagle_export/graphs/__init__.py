"""From a torch module to a checked ONNX file: signatures, tracing, operators, passes, weights on disk."""
