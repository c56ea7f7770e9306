#!/usr/bin/env bash
# Export the commits of .work/vllm to patches/; --check only lists what differs.
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/front.sh"
run refresh "$@"
