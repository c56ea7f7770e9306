#!/usr/bin/env bash
# Prove that patches/ is complete, well-formed and gives the pinned tree.
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/front.sh"
run check "$@"
