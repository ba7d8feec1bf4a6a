"""Files on disk, understood without torch: config rules, safetensors headers, expected tensors, byte sizes.

`rules.evaluate` judges a config mapping, `inventory.expected_tensors` says what its weights must be, and
`header.read_header` what a file really holds. Nothing here allocates by what a file claims, and nothing is executed.
"""
