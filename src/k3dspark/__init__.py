"""k3dspark: the whole life of a DSpark draft model for speculative decoding.

Each folder is one room of the house; its own docstring names the function that is its door. Nothing heavy is
imported here, so that `import k3dspark` and `k3dspark --help` stay instant; the classes live one level down
(`k3dspark.decoding.Engine`, `k3dspark.model.draft.K3DSparkModel`, `k3dspark.embedded.load_embedded_pair`).
"""

from __future__ import annotations

__version__ = "0.1.0"
