"""The verified model, whatever it is made of, behind the small protocol of `protocol.py`.

`loading.open_target` is the door: it opens a model directory in the lean, exact forward of the Llama family
(`llama.py`) or, for every other causal model, through transformers (`transformers_target.py`).
`batch.py` is a separate throughput forward for making training data, where the last bits do not matter.
"""
