#!/usr/bin/env bash
# Run the tests: scripts, tree, gpu, upstream or all.
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/front.sh"
if [[ -n "${DDTREE_GPU_PYTHON:-}" ]] && { [[ "${1:-}" == gpu ]] || [[ "${1:-}" == upstream && " $* " == *" --gpu "* ]]; }; then
  # That machine may have no package index: nothing is set up.
  export PYTHONPATH="$ROOT/scripts/lib${PYTHONPATH:+:$PYTHONPATH}"
  exec "$DDTREE_GPU_PYTHON" -m ddtree_stack test "$@"
fi
run test "$@"
