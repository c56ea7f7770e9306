"""Tree against chain on a GPU. Run by scripts/bench.sh; needs the patched vLLM.

The parent (this package without `workers`) never imports torch: whatever touches the GPU runs in
child processes that it drives over pipes.
"""
