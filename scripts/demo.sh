#!/usr/bin/env bash
# From nothing to a tree-decoded answer on this machine.
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/front.sh"
run demo "$@"
