"""Quantising a model into a checkpoint: rounding, GPTQ and AWQ, layer by layer, in the layouts that others read."""
