"""FP8 (E4M3) weights and activations for exported graphs: our own, small, checked.

A build in fp8 goes like this:

    given = read_checkpoint(folder)                      # None unless the target comes in FP8 already
    scales = calibrate(modules, prompts, shape=tree)     # or Scales.load(file), then .check_identity(...)
    if given is not None:
        scales = given.join(scales)                      # its own input scales where it has them
    scales.check_range("fp16")                           # would a 16-bit graph overflow?
    chosen = choose(scales, keep=("*.down_proj",))       # lm_head and fc stay in 16 bit unless asked
    export_target(..., rewrite=lambda model: quantize(model, chosen.inputs["target"], given))
    export_draft(..., rewrite=lambda model: quantize(model, chosen.inputs["draft"]))
    export_fuse(...)                                     # as it is, unless chosen.inputs.get("fuse")

`load_target` dequantises such a checkpoint into the requested dtype, so that eager modules are what an fp8
graph computes but for the rounding of activations.
"""
