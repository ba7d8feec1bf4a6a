"""A Triton backend that compiles nothing: kernels run in Triton's interpreter (TRITON_INTERPRET=1)."""
