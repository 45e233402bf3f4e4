"""eagle-export: a language model and its EAGLE head to plain ONNX graphs and compiled engines."""
