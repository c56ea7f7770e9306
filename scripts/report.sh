#!/usr/bin/env bash
# Measure the reference pair: tests/models/REPORT.md and its plot.
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/front.sh"
run report "$@"
