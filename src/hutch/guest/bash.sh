# The driver of a persistent bash: runs code that arrives on a descriptor, again and again, in one shell.
#
# Started as `bash --norc --noprofile bash.sh RUNS`. It starts itself anew as a script that is called `bash`, because
# that is how bash names itself in error messages, in $0 and in BASH_SOURCE. It uses builtins only, and forks nothing
# between runs.
#
# A run is an `eval` at the top level of that script, in a loop. Whatever ends a shell (exit, set -e, set -u, ${x:?},
# an interrupt) cannot be caught in bash: it leads to the EXIT trap, which writes the shell's state into RUNS and
# starts the driver anew in the same process, where the state is read back. Descriptors, working directory, umask,
# limits and children survive that by themselves; the table of jobs does not.
#
# User code may change every option of the shell. So everything here is quoted, calls builtins by `builtin`, assigns
# no variable that is not its own, has no command that may fail outside of a condition, and redirects with `>|`.

if [[ $0 != bash ]]; then
    builtin printf '%s\n' '. "$1"; \builtin eval "$__hutch_main"' >"$1/bash"
    builtin cd -- "$1"
    exec "$BASH" --norc --noprofile bash "$0" "$1" start "$OLDPWD"
fi

builtin trap : INT # until the first run an interrupt means nothing
__hutch_file=$1 __hutch_runs=$2 __hutch_self=$BASH
__hutch_phase=idle __hutch_token='' __hutch_status=0 __hutch_code='' __hutch_depth=0 __hutch_suspended='' __hutch_flags=''
__hutch_line=() __hutch_lines=() __hutch_call=()

# ---- descriptors ----------------------------------------------------------------------------------------------------

# There is one way in bash to set close-on-exec: a compound command with a redirection keeps the original descriptor
# under another number, and that one is set so. The loop therefore runs inside of such a command. "base" is where the
# descriptors are outside of it, as they must survive the new start; "kept" is where they are while user code runs.
# They are, in this order: control, code, standard input, and the output and the error that the driver began with.

__hutch_take_descriptors() {
    for __hutch_base in 1000 200 40 20; do
        if { builtin eval "{ builtin :; } $((__hutch_base + 19))</dev/null"; } 2>/dev/null; then
            builtin break
        fi
    done
    local -i base=__hutch_base
    builtin eval "exec $base>&3 $((base + 1))<&4 $((base + 2))<&5 $((base + 3))>&1 $((base + 4))>&2" \
        "3>&- 4>&- 5>&-"
}

__hutch_plan_descriptors() { # sets what the compound command is made of
    local -i base=__hutch_base spare=__hutch_base+9 i
    __hutch_kept=$((spare + 1)) __hutch_shelter='' __hutch_drop='' __hutch_recover=''
    for ((i = 0; i < 5; i++)); do
        __hutch_shelter+=" $((base + i))>&$spare"
        __hutch_drop+=" $((base + i))>&-"
        __hutch_recover+=" 0>&$((__hutch_kept + i)) $((base + i))>&0" # close-on-exec would be copied, but for 0 to 2
    done
    builtin eval "exec $spare</dev/null"
    __hutch_drop+=" $((base + 5))>&- $spare>&-"
}

# ---- runs -----------------------------------------------------------------------------------------------------------

# Parsed once, on one line, so that the first line of user code is line 1. A stray `break` in user code can end the
# loop, but not what follows it; code that has one is run outside of the loop, where bash complains about it. The two
# branches differ in nothing but the $? that the code finds.

__hutch_run='if __hutch_begin; then \builtin eval "$__hutch_code"; else \builtin eval "$__hutch_code"; fi; { __hutch_done; } 2>/dev/null'
__hutch_loop="while __hutch_next; do $__hutch_run; done; { __hutch_done; } 2>/dev/null; if __hutch_is_flat; then $__hutch_run; fi; \\builtin eval \"\$__hutch_loop\""

__hutch_next() { # waits for a run; false when it has to be run outside of the loop
    builtin mapfile -t -n 1 -u "$__hutch_kept" __hutch_line
    if [[ -z ${__hutch_line[0]-} ]]; then
        builtin trap - EXIT # the host is gone
        builtin exit 0
    fi
    __hutch_phase=run
    local rest=${__hutch_line[0]#* } flags=${__hutch_line[0]##* }
    __hutch_token=${rest%% *}
    rest=${rest#* * * }
    builtin mapfile __hutch_lines <"/proc/self/fd/$((__hutch_kept + 1))"
    builtin printf -v __hutch_code %s "${__hutch_lines[@]}"
    __hutch_lines=()
    if [[ ${rest%% *} == 0 ]]; then
        exec 0</dev/null
    else
        exec 0<"/proc/self/fd/$((__hutch_kept + 2))"
    fi
    if [[ ,$flags, == *,once,* ]]; then
        { __hutch_once; } 2>/dev/null
        return 0
    fi
    if [[ -n ${__hutch_traps[INT]+set} ]]; then
        builtin trap -- "${__hutch_traps[INT]}" INT
    fi
    __hutch_add_end
    if [[ -n $__hutch_suspended ]]; then
        __hutch_code="\\builtin set -$__hutch_suspended;$__hutch_code"
        __hutch_suspended=''
    fi
    if [[ $__hutch_depth -lt 500 && ($__hutch_code == *break* || $__hutch_code == *continue*) ]]; then
        __hutch_depth=$((__hutch_depth + 1)) __hutch_phase=flat
        return 1
    fi
    return 0
}

__hutch_is_flat() {
    if [[ $__hutch_phase == flat ]]; then
        __hutch_phase=run
        return 0
    fi
    return 1
}

__hutch_begin() { return "$__hutch_status"; }

# To set -e and to the ERR trap the `eval` is a command too, whose failure they would take for another one. So the end
# of the run is announced from within, where the code surely is complete: what was appended to a half sentence would
# become part of it. The nesting makes sure that no stray closing word in the code ends the test early.

__hutch_add_end() {
    if [[ $- == *v* || ($- != *e* && $__hutch_code != *set\ -* && $__hutch_code != *errexit* && $__hutch_code != *ERR* &&
        -z ${__hutch_traps[ERR]+set}) ]]; then
        return 0
    fi
    local head='__hutch_check() { if :; then ( case x in x)' tail=';; esac ) fi; }'
    if { builtin eval "$head"$'\n'"$__hutch_code"$'\n'"$tail"; } 2>/dev/null; then
        __hutch_code+=$'\n{ __hutch_done; } 2>/dev/null'
        builtin unset -f __hutch_check
    fi
    return 0
}

__hutch_done() {
    __hutch_status=$?
    if [[ $__hutch_phase != run ]]; then
        return 0
    fi
    __hutch_phase=idle __hutch_code=''
    case $- in *a*x*) __hutch_suspended=ax ;; *a*) __hutch_suspended=a ;; *x*) __hutch_suspended=x ;; esac
    builtin set +ax # what is left of this function, and the next run's beginning, are nobody's business
    builtin trap -- "$__hutch_on_int" INT
    builtin printf 'done %s %d\n' "$__hutch_token" "$__hutch_status" >&"$__hutch_kept"
    __hutch_token=''
    return 0
}

# A run that is the only one is a process of its own, which is the best imitation of a script. Its file is the one
# that this shell was started with, and has long read.

__hutch_once() {
    local -i is_written=0
    if { builtin printf 'builtin cd -- %q; builtin unset OLDPWD; %s' "$PWD" "$__hutch_code" >|"$__hutch_runs/bash"; }; then
        is_written=1
    fi
    __hutch_code=__hutch_begin __hutch_status=0
    (
        builtin trap - INT EXIT
        if ((is_written)); then
            builtin cd -- "$__hutch_runs"
            exec "$__hutch_self" --norc --noprofile bash
        fi
        exec "$__hutch_self" --norc --noprofile /dev/fd/9 9<"/proc/self/fd/$((__hutch_kept + 1))"
    ) 2>&"$((__hutch_kept + 4))" || __hutch_status=$?
}

# ---- the end of the shell -------------------------------------------------------------------------------------------

__hutch_on_int='{ __hutch_interrupt; } 2>/dev/null'
__hutch_on_exit='{ __hutch_leave "$?" "${#FUNCNAME[@]}" "$@"; } 2>/dev/null; __hutch_restore_output; if __hutch_begin; then \builtin eval "$__hutch_code"; else \builtin eval "$__hutch_code"; fi; { __hutch_restart; } 2>/dev/null'

# `exit` itself would leave the variables of the functions it is called in for those of the shell. A failing expansion
# ends the shell too, but not without having left the functions.

exit() {
    { __hutch_exit "$?" "$@"; } 2>/dev/null
    builtin exit "${@:-$__hutch_status}"
}

__hutch_exit() { # returns when this is a matter of the builtin
    if [[ $BASHPID != "$$" ]]; then
        __hutch_status=$1
        return 0
    fi
    if (($# > 2)) || [[ ${2-0} == *[!0-9]* || ${2-0} == '' || ${#2} -gt 9 ]]; then
        __hutch_status=$1
        return 0
    fi
    __hutch_status=$((10#${2-$1} & 255))
    if [[ $__hutch_phase == leaving ]]; then
        __hutch_restart
    fi
    __hutch_stop exit
}

__hutch_stop() {
    __hutch_phase=$1 __hutch_flags=$-
    builtin set +e # with it bash would end at once
    builtin : "${__hutch_never:?}"
}

__hutch_interrupt() {
    case $BASHPID:$__hutch_phase in
    "$$:run" | "$$:flat")
        __hutch_status=130
        __hutch_stop interrupt
        ;;
    "$$:leaving")
        __hutch_status=130
        __hutch_restart
        ;;
    esac
    return 0
}

# From here to the new start every name is the driver's, as `declare -p` in a function sees the function's own variables.

__hutch_leave() { # the beginning of the EXIT trap: what is to be kept is written down
    if [[ $BASHPID != "$$" || $__hutch_phase == leaving ]]; then
        builtin exit "$1"
    fi
    local __hutch_before=$__hutch_phase
    __hutch_phase=leaving
    case $__hutch_before in run | flat) __hutch_status=$1 __hutch_flags=$- ;; esac
    builtin set +aeux
    builtin trap -- "$__hutch_on_int" INT
    if [[ -e /proc/self/fd/$__hutch_kept ]]; then # bash has not left the compound command
        builtin eval "exec $__hutch_recover"
    fi
    __hutch_code=''
    if [[ $__hutch_before != interrupt && -n ${__hutch_traps[EXIT]+set} ]]; then
        __hutch_code=${__hutch_traps[EXIT]}
        builtin unset '__hutch_traps[EXIT]'
    fi
    if (($2 > 1)); then
        __hutch_leave_functions
    fi
    __hutch_write "${@:3}"
    return 0
}

# Called from the trap, `unset` takes away the variables of the functions that bash has not left. The attribute tells
# them from those of the shell.

__hutch_leave_functions() {
    local __hutch_n __hutch_name __hutch_names=()
    builtin shopt -u localvar_unset 2>/dev/null
    for __hutch_n in {a..z} {A..Z} _; do
        builtin eval "__hutch_names+=(\"\${!$__hutch_n@}\")"
    done
    for __hutch_name in "${__hutch_names[@]}"; do
        case $__hutch_name in __hutch_* | _ | FUNCNAME | BASH_* | DIRSTACK | PIPESTATUS | LINENO) continue ;; esac
        builtin declare -g -t "$__hutch_name"
        for ((__hutch_n = 0; __hutch_n < 1000; __hutch_n++)); do
            if builtin eval "[[ \${$__hutch_name@a} == *t* ]]" || ! builtin unset -v "$__hutch_name"; then
                builtin break
            fi
        done
        builtin declare -g +t "$__hutch_name"
        if [[ ! -v $__hutch_name ]] && builtin eval "((\${#$__hutch_name[@]} == 0))"; then
            builtin unset -v "$__hutch_name"
        fi
    done
}

# After set -e bash does not put right what was redirected: the output of a function that failed may still go to a file.

__hutch_restore_output() {
    builtin eval "exec 1>&$((__hutch_base + 3)) 2>&$((__hutch_base + 4))"
}

__hutch_write() {
    builtin export -n "${!__hutch_@}"
    builtin declare -p >|"$__hutch_runs/variables"
    builtin trap -p >|"$__hutch_runs/traps"
    {
        builtin shopt -p
        builtin set +o
        if [[ $__hutch_suspended$__hutch_flags == *a* ]]; then builtin printf '%s\n' 'declare __hutch_suspended+=a'; fi
        if [[ $__hutch_suspended$__hutch_flags == *x* ]]; then builtin printf '%s\n' 'declare __hutch_suspended+=x'; fi
        if [[ $__hutch_flags == *e* ]]; then builtin printf '%s\n' 'set -e'; fi
        if [[ $__hutch_flags == *u* ]]; then builtin printf '%s\n' 'set -u'; fi
    } >|"$__hutch_runs/options"

    builtin declare -F >|"$__hutch_runs/functions"
    builtin mapfile -t __hutch_lines <"$__hutch_runs/functions"
    {
        local __hutch_n
        for __hutch_n in "${__hutch_lines[@]}"; do
            case ${__hutch_n##* } in __hutch_* | exit | trap) continue ;; esac
            builtin declare -f -- "${__hutch_n##* }"
            if [[ $__hutch_n != 'declare -f '* ]]; then
                builtin printf 'builtin %s\n' "$__hutch_n"
            fi
            builtin printf '%s\n' "$__hutch_mark"
        done
    } >|"$__hutch_runs/functions"

    {
        builtin alias -p
        for ((__hutch_n = ${#DIRSTACK[@]} - 1; __hutch_n > 0; __hutch_n--)); do
            builtin printf 'builtin pushd -n -- %q >/dev/null\n' "${DIRSTACK[__hutch_n]}"
        done
        builtin printf 'builtin cd -- %q || builtin cd -P %q\n' "${PWD-/}" "/proc/self/fd/$((__hutch_base + 5))"
        if [[ -n ${OLDPWD+set} ]]; then
            builtin printf 'OLDPWD=%q\n' "$OLDPWD"
        else
            builtin printf 'builtin unset OLDPWD\n'
        fi
        for __hutch_n in DEBUG ERR RETURN; do
            if [[ -n ${__hutch_traps[$__hutch_n]+set} ]]; then
                builtin printf 'trap -- %q %s\n' "${__hutch_traps[$__hutch_n]}" "$__hutch_n"
            fi
        done
        builtin printf 'builtin set --'
        if (($#)); then builtin printf ' %q' "$@"; fi
        builtin printf '\n__hutch_complete=1\n'
    } >|"$__hutch_runs/settings"
}

__hutch_restart() {
    if [[ $BASHPID != "$$" ]]; then
        builtin exit 1
    fi
    __hutch_load traps
    if [[ $__hutch_text == *"trap -- '' "* ]]; then # what is ignored now could never be trapped again
        __hutch_mode=reset
        builtin eval "$__hutch_text"
    fi
    { builtin eval "exec $((__hutch_base + 5))<."; } 2>/dev/null
    builtin cd -- "$__hutch_runs"
    builtin eval 'exec -c "$__hutch_self" --norc --noprofile bash "$__hutch_file" "$__hutch_runs"' \
        'resume "$__hutch_base" "$__hutch_token" "$__hutch_status"' "1>&$((__hutch_base + 3)) 2>&$((__hutch_base + 4))"
}

__hutch_load() {
    builtin mapfile __hutch_lines <"$__hutch_runs/$1"
    builtin printf -v __hutch_text %s "${__hutch_lines[@]/#/${2-}}"
    __hutch_lines=()
}

# At the top level, or else `declare` would make variables of a function, and functions would be the driver's own.
# Aliases are not expanded before the options are back, which come last.

__hutch_resume='__hutch_load variables; { \builtin eval "${__hutch_text/declare -ar BASH_VERSINFO=/#}"; } 2>/dev/null; __hutch_load functions; __hutch_functions=$__hutch_text; \builtin shopt -s extglob; while __hutch_next_function; do \builtin eval "$__hutch_text"; done; __hutch_resumed "$@"; __hutch_load settings; { \builtin eval "$__hutch_text"; } 2>/dev/null; __hutch_load traps; __hutch_mode=raw; { \builtin eval "$__hutch_text"; } 2>/dev/null; __hutch_mode=""; __hutch_load options "builtin "; { \builtin eval "$__hutch_text"; } 2>/dev/null; '

__hutch_mark='#__hutch_mark'

__hutch_next_function() { # one by one, so that the lines of each are counted from its own first
    __hutch_text=${__hutch_functions%%"$__hutch_mark"*} __hutch_functions=${__hutch_functions#*"$__hutch_mark"}
    [[ $__hutch_text == *[!$'\n']* ]]
}

__hutch_resumed() {
    __hutch_phase=idle __hutch_base=$4 __hutch_token=$5 __hutch_status=$6 __hutch_depth=0 __hutch_suspended=''
    __hutch_complete=0
}

# ---- traps ----------------------------------------------------------------------------------------------------------

# The trap for EXIT is the driver's; that of user code is run by it. INT is swapped between runs. The traps that are
# inherited by functions, or not, are set from within a function here, and must not notice the driver's own functions.

__hutch_skip_debug='case $BASH_COMMAND:${FUNCNAME-} in *__hutch_*|*:trap|*:exit) ;; *) \builtin eval '
__hutch_skip_return='case ${FUNCNAME-} in __hutch_*|trap|exit) ;; *) \builtin eval '
__hutch_skip_end=' ;; esac'
__hutch_none=': __hutch_none'

trap() {
    { __hutch_trap "$@"; } 2>/dev/null
    builtin "${__hutch_call[@]}"
}

__hutch_trap() { # sets the builtin's call that is left to do
    __hutch_call=(trap "$@")
    case ${__hutch_mode-} in
    raw) return 0 ;;
    reset)
        __hutch_call=(trap - "$3")
        return 0
        ;;
    list)
        __hutch_list "$2" "$3"
        __hutch_call=(:)
        return 0
        ;;
    esac
    case ${1--p} in
    --) shift ;;
    -p)
        local found signal
        if ! found=$(builtin trap "${@:--p}"); then
            return 0
        fi
        __hutch_mode=list __hutch_listed=''
        builtin eval "$found"
        for signal in DEBUG ERR RETURN; do # which functions do not see
            if [[ -n ${__hutch_traps[$signal]+set} && ($# -lt 2 || " ${*^^} " == *" $signal "*) ]]; then
                __hutch_list "${__hutch_traps[$signal]}" "$signal"
            fi
        done
        __hutch_mode=''
        __hutch_call=(printf %s "$__hutch_listed")
        return 0
        ;;
    - | '') ;;
    -*) return 0 ;;
    esac
    local action=$1 signal
    local -a plain=()
    if (($# == 1)) || [[ -n $1 && $1 != *[!0-9]* ]]; then
        action=-
    else
        shift
    fi
    for signal; do
        local name=${signal^^}
        case ${name#SIG} in
        0 | EXIT) __hutch_trap_shell EXIT "$signal" ;;
        2 | INT) __hutch_trap_shell INT "$signal" ;;
        DEBUG) __hutch_trap_code DEBUG "$__hutch_skip_debug" "$__hutch_skip_end" ;;
        RETURN) __hutch_trap_code RETURN "$__hutch_skip_return" "$__hutch_skip_end" ;;
        ERR) __hutch_trap_code ERR '' '' ;;
        *) plain+=("$signal") ;;
        esac
    done
    if ((${#plain[@]})); then
        __hutch_call=(trap -- "$action" "${plain[@]}")
    else
        __hutch_call=(:)
    fi
}

__hutch_trap_shell() {
    if [[ $BASHPID != "$$" ]]; then
        plain+=("$2")
    elif [[ $action == - ]]; then
        builtin unset "__hutch_traps[$1]"
        if [[ $1 == INT ]]; then builtin trap -- "$__hutch_on_int" INT; fi
    else
        __hutch_traps[$1]=$action
        if [[ $1 == INT ]]; then builtin trap -- "$action" INT; fi
    fi
}

__hutch_trap_code() {
    if [[ $action != - ]]; then
        __hutch_traps[$1]=$action
        if [[ -n $2 ]]; then
            builtin trap -- "$2${action@Q}$3" "$1"
        else
            builtin trap -- "$action" "$1"
        fi
    elif [[ -n ${__hutch_traps[$1]+set} ]]; then
        # Bash would bring back the old one at the end of this function.
        builtin unset "__hutch_traps[$1]"
        builtin trap -- "$__hutch_none" "$1"
    fi
}

__hutch_list() {
    local action=$1 quoted
    case $action in
    "$__hutch_on_int" | "$__hutch_none" | "$__hutch_skip_debug"* | "$__hutch_skip_return"*) return 0 ;;
    "$__hutch_on_exit")
        if [[ -z ${__hutch_traps[EXIT]+set} ]]; then
            return 0
        fi
        action=${__hutch_traps[EXIT]}
        ;;
    esac
    builtin printf -v quoted 'trap -- %s %s\n' "${action@Q}" "$2"
    __hutch_listed+=$quoted
}

# ---- the beginning --------------------------------------------------------------------------------------------------

__hutch_enter() {
    __hutch_plan_descriptors
    builtin trap -- "$__hutch_on_exit" EXIT
    builtin trap -- "$__hutch_on_int" INT
}

__hutch_ready() {
    builtin eval "exec $__hutch_drop"
    if [[ -z $__hutch_token ]]; then
        builtin printf 'ready\n' >&"$__hutch_kept"
    else
        builtin printf 'done %s %d\n' "$__hutch_token" "$__hutch_status" >&"$__hutch_kept"
    fi
}

declare -A __hutch_traps=()
__hutch_main='__hutch_enter; \builtin eval "{ __hutch_ready; \\builtin eval \"\$__hutch_loop\"; } $__hutch_shelter"'
if [[ $3 == resume ]]; then
    __hutch_main=$__hutch_resume$__hutch_main
else
    __hutch_take_descriptors
    builtin cd -- "$4"
    builtin unset OLDPWD
    builtin shopt -s expand_aliases
    builtin set --
fi
