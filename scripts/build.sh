#!/usr/bin/env bash
# A wheel of the patched Python over the pinned wheel's binaries.
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/front.sh"
run build "$@"
