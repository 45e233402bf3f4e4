"""From one ONNX graph to one TensorRT or TensorRT-RTX engine. `compile.compile_engine` is the way in."""
