#!/usr/bin/env bash
# The first bad patch of the stack, or the first upstream commit on which the stack goes bad.
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/front.sh"
run bisect "$@"
