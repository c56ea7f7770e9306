#!/usr/bin/env bash
# Bring the stack onto another upstream release, as upstream/next.
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/front.sh"
run rebase "$@"
