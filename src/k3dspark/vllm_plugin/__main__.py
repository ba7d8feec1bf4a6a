"""`python -m k3dspark.vllm_plugin` prints the folder for PYTHONPATH that a server on CPU needs for method dspark."""

from __future__ import annotations

from k3dspark.vllm_plugin import interpreter_path

if __name__ == "__main__":
    print(interpreter_path())
