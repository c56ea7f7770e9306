# shellcheck shell=bash
# Sourced by every front: finds Python and git, makes the tools' virtual environment, runs the verb.
set -Eeuo pipefail

ROOT="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd -P)"
FRONT="$(basename -- "$0")"
TOOLS="${DDTREE_TOOLS:-$ROOT/.work/tools}"
export PYTHONDONTWRITEBYTECODE=1 PIP_DISABLE_PIP_VERSION_CHECK=1

# fail CODE WHAT HINT [FACT...]
fail() {
  local code="$1" what="$2" hint="$3"
  shift 3
  printf '%s: error[%s]: %s\n' "$FRONT" "$code" "$what" >&2
  if (($#)); then printf '  %s\n' "$@" >&2; fi
  printf 'hint: %s\n' "$hint" >&2
  exit "$code"
}

# The first Python that upstream supports and that is there.
find_python() {
  local one found=()
  for one in ${DDTREE_PYTHON:+"$DDTREE_PYTHON"} python3 python3.13 python3.12 python3.11 python; do
    command -v -- "$one" >/dev/null 2>&1 || continue
    if "$one" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
      command -v -- "$one"
      return
    fi
    found+=("$one is $("$one" --version 2>&1 | head -n 1)")
  done
  fail 6 "Python 3.11, 3.12 or 3.13 is needed" "DDTREE_PYTHON=/path/to/python3.11 scripts/$FRONT" \
    "${found[@]:-no python3 on PATH}"
}

need_git() {
  command -v git >/dev/null 2>&1 || fail 6 "git is not installed" "apt-get install git"
  local version
  version="$(git --version)"
  version="${version#git version }"
  local major="${version%%.*}" rest="${version#*.}"
  local minor="${rest%%.*}"
  if ((major < 2 || (major == 2 && minor < 34))); then
    fail 6 "git 2.34 or newer is needed" "apt-get install git" "found git $version"
  fi
}

# The pinned libraries, installed again when their list or the Python changes.
need_tools() {
  local list="$ROOT/scripts/lib/requirements-tools.txt" python want log
  [[ -n "${DDTREE_TOOLS:-}" ]] && return
  python="$(find_python)"
  want="$("$python" --version) $(cksum <"$list")"
  [[ "$(cat "$TOOLS/.ready" 2>/dev/null || true)" == "$want" ]] && return
  mkdir -p "$ROOT/.work"
  exec 9>"$ROOT/.work/tools.lock"
  if command -v flock >/dev/null 2>&1; then flock 9; fi
  if [[ "$(cat "$TOOLS/.ready" 2>/dev/null || true)" != "$want" ]]; then
    printf '%s: setting up the tools in .work/tools (once)\n' "$FRONT" >&2
    log="$ROOT/.work/tools.log"
    rm -rf "$TOOLS"
    "$python" -m venv "$TOOLS" >"$log" 2>&1 ||
      fail 6 "$python cannot make a virtual environment" "apt-get install python3-venv" "see $log"
    "$TOOLS/bin/python" -m pip install -r "$list" >"$log" 2>&1 ||
      fail 4 "the tools cannot be installed from the package index" "pip config list" \
        "$(grep -E '^ERROR' "$log" | tail -n 3)" "see $log"
    printf '%s\n' "$want" >"$TOOLS/.ready"
  fi
  exec 9>&-
}

# run VERB ARGS...: the Python that does the work.
run() {
  need_git
  need_tools
  PYTHONPATH="$ROOT/scripts/lib" "$TOOLS/bin/python" -m ddtree_stack "$@"
}
