#!/usr/bin/env bash
# Run the tests: scripts, tree or all.
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/front.sh"
run test "$@"
