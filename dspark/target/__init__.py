"""The target model: a frozen causal decoder, read from a checkpoint, run on flat batches with a KV arena.

families.py reads config.json · rope.py the rotary tables · weights.py names, shapes and fusing · checkpoint.py the
safetensors files · cache.py the arena · decoder.py the forward pass · load.py where a source name leads.
"""
