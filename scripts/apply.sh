#!/usr/bin/env bash
# The base, then one commit per patch, in .work/vllm.
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/front.sh"
run apply "$@"
