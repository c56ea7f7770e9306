#!/usr/bin/env bash
# The pinned source distribution as one base commit in .work/vllm.
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/front.sh"
run fetch "$@"
