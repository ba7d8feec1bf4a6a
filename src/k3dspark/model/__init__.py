"""The draft network: config, rotary positions, latent attention, heads, the context cache, and loading.

Everything is plain PyTorch behind the operators of `ops.py`; nothing here knows a target beyond its tensors.
`loading.load_draft` is the door to a checkpoint, `draft.K3DSparkModel` to a network built from a config.
"""
