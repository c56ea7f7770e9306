#!/usr/bin/env bash
# Tree against chain on this machine's GPU.
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/front.sh"

# A Python that holds the patched vLLM holds what this verb needs: no tools are set up, no index is
# asked, and what the caller put on its path stays there.
args=("$@")
for ((i = 0; i < $#; i++)); do
  if [[ "${args[i]}" == --python && -n "${args[i + 1]:-}" ]]; then
    export PYTHONPATH="$ROOT/scripts/lib${PYTHONPATH:+:$PYTHONPATH}"
    exec "${args[i + 1]}" -m ddtree_stack bench "$@"
  fi
done
run bench "$@"
