#!/usr/bin/env bash
# A slim copy of a clone of upstream, for quick rebases and bisects.
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/front.sh"
run mirror "$@"
