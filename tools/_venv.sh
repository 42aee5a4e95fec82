# Sourced by tools/demo and tools/test (bash). Gives them a Python that has all they need, on a machine with Python and pip.
#
#   . tools/_venv.sh          sets ROOT, the checkout, wherever it is called from
#   ensure_venv EXTRAS...     makes ROOT/.venv where needed, installs shmloader there (editable) with these extras
#                             at the versions of constraints.txt, and sets PY to its python
#
# Nothing is written outside the checkout and the temporary directory; a stamp makes the second call take milliseconds.
# Python is $PYTHON if set, else the first python3 on the PATH that is new enough.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)

_refuse() {
    printf '%s: %s\n' "$(basename "$0")" "$*" >&2
    exit 1
}

# Prints the path of a Python >= 3.10, or says which ones were found to be older.
_find_python() {
    local candidate found path seen=""
    if [ -n "${PYTHON:-}" ]; then
        set -- "$PYTHON"
    else
        set -- python3 python3.14 python3.13 python3.12 python3.11 python3.10 python
    fi
    for candidate; do
        # A name may be on the PATH and still not start (a version manager's shim): ask each to run.
        found=$("$candidate" -c 'import sys; print("%d.%d %s" % (sys.version_info[0], sys.version_info[1], sys.executable))' 2>/dev/null) || continue
        path=${found#* }
        if "$path" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            printf '%s\n' "$path"
            return
        fi
        seen="$seen $candidate is ${found%% *};"
    done
    _refuse "Python 3.10 or newer is needed, and none was found:${seen:- no $* starts;} install one or set PYTHON=/path/to/python3"
}

# All that decides what an installed environment holds. A moved checkout counts: scripts in .venv hold absolute paths.
_fingerprint() {
    {
        printf '%s\n' "$ROOT"
        cat "$ROOT/setup.cfg" "$ROOT/pyproject.toml" "$ROOT/constraints.txt" "$ROOT/tools/_venv.sh"
    } | cksum
}

# Extras that the stamp says are installed. Nothing, and status 1, if the stamp belongs to other files.
_stamped_extras() {
    [ -x "$PY" ] && [ -f "$ROOT/.venv/stamp" ] || return 1
    [ "$(head -n 1 "$ROOT/.venv/stamp")" = "$(_fingerprint)" ] || return 1
    tail -n +2 "$ROOT/.venv/stamp"
}

# Whether the stamp covers the extras that are given, and Python still starts (it may have been removed from the system).
_is_ready() {
    local extra have
    have=" $(_stamped_extras | tr '\n' ' ')" || return 1
    for extra; do
        case $have in *" $extra "*) ;; *) return 1 ;; esac
    done
    _stamped_extras >/dev/null && "$PY" -c '' 2>/dev/null
}

_make_venv() {
    local python extras installed log clear=""
    # An environment that does not start or was moved here from elsewhere is made anew; one without pip is completed.
    if ! { "$PY" -c '' && grep -qF "$ROOT/.venv" "$ROOT/.venv/bin/activate"; } 2>/dev/null; then clear=--clear; fi
    if [ -n "$clear" ] || ! "$PY" -m pip --version >/dev/null 2>&1; then
        python=$(_find_python) || exit 1
        log=$("$python" -m venv $clear "$ROOT/.venv" 2>&1) || _refuse "$python cannot make a virtual environment" \
            "(on Debian and Ubuntu: apt-get install python3-venv): $log"
    fi
    installed=$(_stamped_extras) || installed=""
    extras=$(printf '%s\n' "$@" $installed | sort -u)
    printf 'Installing shmloader[%s] into %s (once)...\n' "$(echo $extras | tr ' ' ',')" "$ROOT/.venv" >&2
    rm -f "$ROOT/.venv/stamp"
    "$PY" -m pip install --quiet --no-cache-dir --disable-pip-version-check --no-warn-script-location \
        --constraint "$ROOT/constraints.txt" --editable "$ROOT[$(echo $extras | tr ' ' ',')]" >&2 ||
        _refuse "pip could not install what is needed; its message is above"
    { _fingerprint && printf '%s\n' $extras; } >"$ROOT/.venv/stamp.new"
    mv "$ROOT/.venv/stamp.new" "$ROOT/.venv/stamp"
}

ensure_venv() {
    PY=$ROOT/.venv/bin/python
    _is_ready "$@" && return
    # Two commands that start at one time take turns. The lock is on a directory: no file is left behind.
    (
        if command -v flock >/dev/null; then flock 9; fi
        _is_ready "$@" || _make_venv "$@"
    ) 9<"$ROOT/tools" || exit 1
}
