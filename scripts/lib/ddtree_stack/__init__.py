"""Tooling of the vllm-ddtree patch stack: one module per verb, small helpers beside them."""
