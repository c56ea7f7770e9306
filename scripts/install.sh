#!/usr/bin/env bash
# .venv with the patched tree.
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/front.sh"
run install "$@"
