"""The command line: one thin module per command, which parses, calls one function and prints.

`main.main` is the door (the `k3dspark` console script). Modules here import nothing heavy at the top, so that
`k3dspark --help` answers without loading torch or transformers.
"""
