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
# User code may change every option of the shell, and make any name a readonly variable, a function or an alias. So
# everything here is quoted, calls builtins by `builtin`, has only names that begin with __hutch_, even of local
# variables, has no command that may fail outside of a condition, and redirects with `>|`.

# ---- the first start ------------------------------------------------------------------------------------------------

# There is one way in bash to set close-on-exec: a compound command with a redirection keeps the original descriptor
# under another number, and that one is set so. The loop therefore runs inside of such a command. From "base" on are
# the descriptors outside of it, as they must survive a new start; from "kept" on they are while user code runs. In
# this order: control, code, standard input, and the output and the error that the driver was started with.
#
# The script is one line, so that the first line of user code is line 1. What an earlier start left is brought back at
# its top level: in a function `declare` would make variables of the function, in a file that is sourced the functions
# would get its name. The two branches of a run differ in nothing but the $? that the code finds. A `break` too many in
# user code ends the loop, so code that has one is run behind it; the loop then goes on one level deeper.

__hutch_run='if __hutch_begin; then \builtin eval "$__hutch_code"; else \builtin eval "$__hutch_code"; fi; '
__hutch_run+='{ __hutch_done; } 2>/dev/null; '
__hutch_loop="while __hutch_next; do $__hutch_run done; if __hutch_is_behind; then $__hutch_run fi; "
__hutch_loop+='\builtin eval "$__hutch_loop"; '

if [[ ${__hutch_parts-0} == 0 && $0 != bash ]]; then
    __hutch_first() {
        local -i base i
        local shelter='' move=''
        for base in 1000 200 40 20; do
            if { builtin eval "{ builtin :; } $((base + 19))</dev/null"; } 2>/dev/null; then
                builtin break
            fi
        done
        for i in 0 1 2 3 4; do
            shelter+=" $((base + i))>&$((base + 9))"
        done
        builtin printf '%s' '. "$1"; ' \
            'exit() { { __hutch_exit "$?" "$@"; } 2>/dev/null; builtin exit "${@:-$__hutch_status}"; }; ' \
            'trap() { { __hutch_more __hutch_trap "$@"; } 2>/dev/null; builtin "${__hutch_call[@]}"; }; ' \
            'if [[ $4 == resume ]]; then ' \
            '__hutch_load variables; { \builtin eval "$__hutch_text"; } 2>/dev/null; __hutch_resume "$@"; ' \
            'while __hutch_next_function; do \builtin eval "$__hutch_text"; done; ' \
            '__hutch_load settings; { \builtin eval "$__hutch_text"; } 2>/dev/null; ' \
            '__hutch_load options "builtin "; { \builtin eval "$__hutch_text"; } 2>/dev/null; ' \
            'else \builtin set --; fi; ' \
            '{ { __hutch_ready; } 2>/dev/null; ' "$__hutch_loop" '}' "$shelter" $'\n' >|"$2/bash"
        move="$base>&3 $((base + 1))<&4 $((base + 2))<&5 $((base + 3))>&1 $((base + 4))>&2 3>&- 4>&- 5>&-"
        builtin cd -- "$2"
        builtin eval 'exec "$BASH" --norc --noprofile bash "$1" "$2" "$base" start "$OLDPWD"' "$move"
    }
    __hutch_first "$0" "$1"
fi

if [[ ${__hutch_parts-0} == 0 ]]; then
    builtin trap : INT # until the first run an interrupt means nothing
    __hutch_parts=1
    __hutch_file=$1 __hutch_runs=$2 __hutch_base=$3 __hutch_kept=$(($3 + 10)) __hutch_self=$BASH
    __hutch_phase=idle __hutch_token='' __hutch_status=0 __hutch_code='' __hutch_depth=0
    __hutch_suspended='' __hutch_flags='' __hutch_options='' __hutch_mode=''
    __hutch_line=() __hutch_lines=() __hutch_call=() __hutch_answer=$'ready\n' __hutch_is_whole=1
    declare -A __hutch_traps=()
    builtin eval "exec $((__hutch_base + 9))</dev/null"
    if [[ $4 == start ]]; then
        builtin cd -- "$5"
        builtin unset OLDPWD
        builtin shopt -s expand_aliases
    fi
fi

__hutch_ready() {
    local __hutch_n __hutch_drop="$((__hutch_base + 5))>&- $((__hutch_base + 9))>&-"
    for __hutch_n in 0 1 2 3 4; do
        __hutch_drop+=" $((__hutch_base + __hutch_n))>&-"
    done
    builtin eval "exec $__hutch_drop"
    builtin trap -- "$__hutch_on_exit" EXIT
    builtin trap -- "$__hutch_on_int" INT
    for __hutch_n in DEBUG ERR RETURN; do
        if [[ -n ${__hutch_traps[$__hutch_n]+set} ]]; then
            trap -- "${__hutch_traps[$__hutch_n]}" "$__hutch_n"
        fi
    done
    if [[ $__hutch_is_whole != 1 ]]; then
        builtin printf 'bash: no room to keep the state of the shell beyond its end\n' >&"$((__hutch_kept + 4))"
    fi
    builtin printf '%s' "$__hutch_answer" >&"$__hutch_kept"
    __hutch_answer=''
}

# ---- runs -----------------------------------------------------------------------------------------------------------

__hutch_next() { # waits for a run; false when it is to be run behind the loop
    if [[ $__hutch_phase == run ]]; then
        { __hutch_more builtin :; } 2>/dev/null
        __hutch_stray
    fi
    builtin mapfile -t -n 1 -u "$__hutch_kept" __hutch_line
    if [[ -z ${__hutch_line[0]-} ]]; then
        builtin trap - EXIT # the host is gone
        builtin exit 0
    fi
    __hutch_phase=run
    local __hutch_rest=${__hutch_line[0]#* }
    __hutch_token=${__hutch_rest%% *}
    __hutch_rest=${__hutch_rest#* * * }
    builtin mapfile __hutch_lines <"/proc/self/fd/$((__hutch_kept + 1))"
    builtin printf -v __hutch_code %s "${__hutch_lines[@]}"
    __hutch_lines=()
    if [[ ${__hutch_rest%% *} == 0 ]]; then
        exec 0</dev/null
    else
        exec 0<"/proc/self/fd/$((__hutch_kept + 2))"
    fi
    if [[ ,${__hutch_rest##* }, == *,once,* ]]; then
        { __hutch_more __hutch_once; } 2>/dev/null
        return 0
    fi
    if [[ -n ${__hutch_traps[INT]+set} ]]; then
        builtin trap -- "${__hutch_traps[INT]}" INT
    fi
    local -i __hutch_is_short=$((${#__hutch_code} < 1000000)) # or else a look into it takes too long
    if ((__hutch_is_short)); then
        __hutch_add_end
    fi
    if [[ -n $__hutch_suspended ]]; then
        __hutch_code="\\builtin set -$__hutch_suspended;$__hutch_code"
        __hutch_suspended=''
    fi
    if ((__hutch_is_short && __hutch_depth < 1000)); then
        case $__hutch_code in
        *break* | *continue*)
            __hutch_depth=$((__hutch_depth + 1)) __hutch_phase=behind
            return 1
            ;;
        esac
    fi
    return 0
}

__hutch_is_behind() {
    if [[ $__hutch_phase == run ]]; then
        { __hutch_more builtin :; } 2>/dev/null
        __hutch_stray
    fi
    __hutch_phase=run
    return 0
}

__hutch_begin() { return "$__hutch_status"; }

# To set -e and to the ERR trap the `eval` is a command too, whose failure they would take for another one. So the end
# of the run is announced from within, where the code surely is complete: what was appended to a half sentence would
# become part of it. The nesting makes sure that no stray closing word in the code ends the test early.

__hutch_add_end() {
    if [[ $- == *v* || $__hutch_code == *'set -v'* ]]; then
        return 0 # it would be seen
    fi
    if [[ $- != *e* && -z ${__hutch_traps[ERR]+set} && $__hutch_code != *'set -'* && $__hutch_code != *ERR* ]]; then
        return 0
    fi
    local __hutch_head='__hutch_check() { if :; then ( case x in x)' __hutch_tail=';; esac ) fi; }'
    if { builtin eval "$__hutch_head"$'\n'"$__hutch_code"$'\n'"$__hutch_tail"; } 2>/dev/null; then
        __hutch_code+=$'\n{ __hutch_done; } 2>/dev/null'
        builtin unset -f __hutch_check
    fi
    return 0
}

__hutch_done() {
    local __hutch_last=$?
    if [[ $__hutch_phase != run ]]; then
        return 0
    fi
    __hutch_phase=idle __hutch_code='' __hutch_status=$__hutch_last
    case $- in *a*x*) __hutch_suspended=ax ;; *a*) __hutch_suspended=a ;; *x*) __hutch_suspended=x ;; esac
    if [[ $- == *a* ]]; then
        builtin set +a
        builtin export -n "${!__hutch_@}"
    fi
    builtin set +x # what is left of this function, and the next run's beginning, are nobody's business
    builtin trap -- "$__hutch_on_int" INT
    builtin printf 'done %s %d\n' "$__hutch_token" "$__hutch_status" >&"$__hutch_kept"
    __hutch_token=''
    return 0
}

# ---- the end of the shell -------------------------------------------------------------------------------------------

__hutch_on_int='{ __hutch_interrupt; } 2>/dev/null'
__hutch_on_exit='{ __hutch_more __hutch_leave "$?" "${FUNCNAME[1]+function}" "$@"; } 2>/dev/null; '
__hutch_on_exit+='__hutch_restore_output; '
__hutch_on_exit+='if __hutch_begin; then \builtin eval "$__hutch_code"; else \builtin eval "$__hutch_code"; fi; '
__hutch_on_exit+='{ __hutch_restart; } 2>/dev/null'

# `exit` itself would leave the variables of the functions it is called in for those of the shell. A failing expansion
# ends the shell too, but not without having left the functions.

__hutch_exit() { # returns when this is a matter of the builtin
    case $BASHPID:$#:${2-0} in
    "$$":[12]:*[!0-9]* | "$$":[12]:) ;;
    "$$":[12]:*)
        __hutch_status=$((10#${2-$1} & 255))
        if [[ $__hutch_phase == leaving ]]; then
            __hutch_restart
        fi
        __hutch_stop exit
        ;;
    esac
    __hutch_status=$1
}

__hutch_stop() {
    __hutch_phase=$1 __hutch_flags=$-
    builtin set +e # with it bash would end at once
    builtin : "${__hutch_never:?}"
}

__hutch_interrupt() {
    case $BASHPID:$__hutch_phase in
    "$$:run" | "$$:behind")
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

# ---- what is seldom needed ------------------------------------------------------------------------------------------

# The rest is read when it is first needed, as it takes longer than to start bash.

__hutch_more() { # calls a function that is defined below
    if [[ $__hutch_parts == 1 ]]; then
        __hutch_parts=2
        if builtin shopt -q expand_aliases; then
            builtin shopt -u expand_aliases
            builtin . "$__hutch_file"
            builtin shopt -s expand_aliases
        else
            builtin . "$__hutch_file"
        fi
    fi
    "$@"
}

if [[ $__hutch_parts == 1 && $4 == start ]]; then
    return 0
fi
__hutch_parts=2

__hutch_stray() { # a `break` or `continue` outside of any loop, which could not be foreseen, was the loop's
    builtin set +x
    builtin printf '%s\n' 'bash: break: only meaningful in a `for'\'', `while'\'', or `until'\'' loop' >&2
    __hutch_status=1
    { __hutch_stop stray; } 2>/dev/null
}

# A run that is the only one is a process of its own, which is the best imitation of a script. Its file is the one
# that this shell was started with, and has long read.

__hutch_once() {
    local __hutch_script=/dev/fd/9
    if builtin printf 'builtin cd -- %q; builtin unset OLDPWD; %s' "$PWD" "$__hutch_code" >|"$__hutch_runs/bash"; then
        __hutch_script=bash
    fi
    __hutch_code=__hutch_begin __hutch_status=0 __hutch_phase=once # an interrupt is for that process alone
    (
        builtin trap - INT EXIT
        if [[ $__hutch_script == bash ]]; then
            builtin cd -- "$__hutch_runs"
            exec "$__hutch_self" --norc --noprofile bash
        fi
        exec "$__hutch_self" --norc --noprofile "$__hutch_script" 9<"/proc/self/fd/$((__hutch_kept + 1))"
    ) 2>&"$((__hutch_kept + 4))" || __hutch_status=$?
    __hutch_phase=run
}

# What follows is seen by `declare -p`, which also lists the variables of the function that calls it.

__hutch_leave() { # the beginning of the EXIT trap: what is to be kept is written down
    if [[ $BASHPID != "$$" || $__hutch_phase == [ld]* ]]; then
        builtin exit "$1"
    fi
    local __hutch_before=$__hutch_phase
    __hutch_phase=leaving
    __hutch_options=:$SHELLOPTS:
    if [[ $__hutch_options == *:posix:* ]]; then
        __hutch_code+=' exit' # where it is always the builtin
    fi
    case $__hutch_before:$1:$__hutch_code in
    run:[1-9]* | run:0:*exit*) __hutch_status=$1 __hutch_flags=$- ;;
    run:* | idle:*) __hutch_phase=dying ;; # only a signal ends a shell so, and will when this is over
    esac
    builtin set +aeux +o posix
    builtin trap -- "$__hutch_on_int" INT
    __hutch_code=''
    if [[ $__hutch_before != [is]* && -n ${__hutch_traps[EXIT]+set} ]]; then
        __hutch_code=${__hutch_traps[EXIT]}
        builtin unset '__hutch_traps[EXIT]'
    fi
    if [[ $__hutch_phase == dying ]]; then
        return 0
    fi
    if [[ -n $2 ]]; then
        __hutch_leave_functions
    fi
    __hutch_write "${@:3}"
    return 0
}

# Called from the trap, `unset` takes away the variables of the functions that bash has not left. The attribute tells
# them from those of the shell.

__hutch_leave_functions() {
    local __hutch_n __hutch_name __hutch_names=()
    local __hutch_letters=abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_
    builtin shopt -u localvar_unset
    for ((__hutch_n = 0; __hutch_n < ${#__hutch_letters}; __hutch_n++)); do
        builtin eval "__hutch_names+=(\"\${!${__hutch_letters:__hutch_n:1}@}\")"
    done
    for __hutch_name in "${__hutch_names[@]}"; do
        case $__hutch_name in
        __hutch_* | _ | BASH_* | DIRSTACK | FUNCNAME | LINENO | PIPESTATUS) builtin continue ;;
        esac
        if [[ -R $__hutch_name ]]; then # all of this would happen to what it stands for
            builtin continue
        fi
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
    if [[ -e /proc/self/fd/$__hutch_kept ]]; then
        exec 1>&"$((__hutch_kept + 3))" 2>&"$((__hutch_kept + 4))"
    else # some errors make bash leave the compound command first
        exec 1>&"$((__hutch_base + 3))" 2>&"$((__hutch_base + 4))"
    fi
}

__hutch_write() {
    local __hutch_n __hutch_whole=1
    builtin export -n "${!__hutch_@}"
    builtin declare -p >|"$__hutch_runs/variables" || __hutch_whole=0
    {
        builtin shopt -p
        builtin set +o
        case $__hutch_suspended$__hutch_flags in *a*) builtin printf 'declare __hutch_suspended+=a\n' ;; esac
        case $__hutch_suspended$__hutch_flags in *x*) builtin printf 'declare __hutch_suspended+=x\n' ;; esac
        case $__hutch_flags in *e*) builtin printf 'set -e\n' ;; esac
        case $__hutch_flags in *u*) builtin printf 'set -u\n' ;; esac
        case $__hutch_options in *:posix:*) builtin printf 'set -o posix\n' ;; esac
    } >|"$__hutch_runs/options"

    builtin declare -F >|"$__hutch_runs/functions"
    builtin mapfile -t __hutch_lines <"$__hutch_runs/functions"
    for __hutch_n in "${__hutch_lines[@]}"; do
        case ${__hutch_n##* } in __hutch_* | exit | trap) builtin continue ;; esac
        builtin declare -f -- "${__hutch_n##* }" || __hutch_whole=0
        if [[ $__hutch_n != 'declare -f '* ]]; then
            builtin printf 'builtin %s\n' "$__hutch_n"
        fi
        builtin printf '%s\n' "$__hutch_mark"
    done >|"$__hutch_runs/functions"

    {
        builtin alias -p
        for ((__hutch_n = ${#DIRSTACK[@]} - 1; __hutch_n > 0; __hutch_n--)); do
            builtin printf 'builtin pushd -n -- %q >/dev/null\n' "${DIRSTACK[__hutch_n]}"
        done
        builtin printf 'builtin cd -- %q || builtin cd -P %q\n' "${PWD-/}" "/proc/self/fd/$((__hutch_base + 5))"
        if [[ -n ${OLDPWD+set} ]]; then
            builtin printf 'OLDPWD=%q\n' "$OLDPWD"
        fi
        for __hutch_n in HOSTNAME IFS OLDPWD OPTERR OPTIND PATH PS4 SHELL SHLVL TERM; do # what a new shell would set
            if [[ ! -v $__hutch_n ]]; then
                builtin printf 'builtin unset -v %s\n' "$__hutch_n"
            fi
        done
        builtin printf '__hutch_mode=raw\n'
        builtin trap -p
        builtin printf '__hutch_mode=\n'
        builtin printf 'builtin set --'
        if (($#)); then
            builtin printf ' %q' "$@"
        fi
        builtin printf '\n__hutch_is_whole=%s\n' "$__hutch_whole"
    } >|"$__hutch_runs/settings"
}

__hutch_restart() {
    if [[ $BASHPID != "$$" || $__hutch_phase == dying ]]; then
        builtin exit "$__hutch_status"
    fi
    local __hutch_n
    builtin trap -p >|"$__hutch_runs/traps"
    __hutch_load traps
    __hutch_mode=reset # what is ignored now could never be trapped again
    builtin eval "$__hutch_text"
    __hutch_text='0</dev/null'
    if [[ -e /proc/self/fd/$__hutch_kept ]]; then
        for __hutch_n in 4 3 2 1 0; do # by way of 0, as from others to others close-on-exec is copied
            __hutch_text="0>&$((__hutch_kept + __hutch_n)) $((__hutch_base + __hutch_n))>&0 $__hutch_text"
        done
    fi
    builtin eval "exec $__hutch_text"
    { builtin eval "exec $((__hutch_base + 5))<."; } 2>/dev/null
    builtin cd -- "$__hutch_runs"
    builtin eval 'exec -c "$__hutch_self" --norc --noprofile bash "$__hutch_file" "$__hutch_runs"' \
        '"$__hutch_base" resume "$__hutch_token" "$__hutch_status"' "1>&$((__hutch_base + 3)) 2>&$((__hutch_base + 4))"
}

__hutch_load() {
    builtin mapfile __hutch_lines <"$__hutch_runs/$1"
    if (($# == 1)); then
        builtin printf -v __hutch_text %s "${__hutch_lines[@]}"
    else
        builtin printf -v __hutch_text "$2%s" "${__hutch_lines[@]}"
    fi
    __hutch_lines=()
    builtin : >|"$__hutch_runs/$1"
}

__hutch_mark='#__hutch_mark'

__hutch_next_function() { # one by one, so that the lines of each are counted from its own first
    __hutch_text=${__hutch_functions%%"$__hutch_mark"*} __hutch_functions=${__hutch_functions#*"$__hutch_mark"}
    [[ $__hutch_text == *[!$'\n']* ]]
}

__hutch_resume() {
    __hutch_phase=idle __hutch_token='' __hutch_status=$6 __hutch_suspended='' __hutch_depth=0 __hutch_is_whole=0
    __hutch_answer=${5:+"done $5 $6"$'\n'} # nothing when no run was active
    __hutch_load functions
    __hutch_functions=$__hutch_text
    builtin shopt -s extglob # for functions that were defined with it; aliases are not expanded yet
}

# ---- traps ----------------------------------------------------------------------------------------------------------

# The trap for EXIT is the driver's; that of user code is run by it. INT is swapped between runs. The traps that are
# inherited by functions, or not, are set from within a function here, and must not notice the driver's own functions.

__hutch_skip_debug='case $BASH_COMMAND:${FUNCNAME-} in *__hutch_*|*:trap|*:exit) ;; *) \builtin eval '
__hutch_skip_return='case ${FUNCNAME-} in __hutch_*|trap|exit) ;; *) \builtin eval '
__hutch_none=': __hutch_none'

__hutch_trap() { # sets the builtin's call that is left to do
    local __hutch_action=${1-} __hutch_signal __hutch_found __hutch_plain=()
    __hutch_call=(trap "$@")
    case $__hutch_mode:${1--p} in
    raw:*)
        case $3 in DEBUG | ERR | RETURN) __hutch_call=(:) ;; esac # which come later
        return 0
        ;;
    reset:*)
        __hutch_call=(:)
        if [[ -z $2 ]]; then
            __hutch_call=(trap - "$3")
        fi
        return 0
        ;;
    list:*)
        __hutch_list "$2" "$3"
        __hutch_call=(:)
        return 0
        ;;
    :-p)
        if __hutch_found=$(builtin trap "${@:--p}"); then
            __hutch_mode=list __hutch_listed=''
            builtin eval "$__hutch_found"
            for __hutch_signal in DEBUG ERR RETURN; do # those that functions do not see
                if [[ -z ${__hutch_traps[$__hutch_signal]+set} ]]; then
                    builtin continue
                elif [[ $# -lt 2 || " ${*^^} " == *" $__hutch_signal "* ]]; then
                    __hutch_list "${__hutch_traps[$__hutch_signal]}" "$__hutch_signal"
                fi
            done
            __hutch_mode=''
            __hutch_call=(printf %s "$__hutch_listed")
        fi
        return 0
        ;;
    :--) shift ;;
    :- | :) ;;
    :-*) return 0 ;;
    esac
    __hutch_action=${1-}
    if (($# == 1)) || [[ -n $__hutch_action && $__hutch_action != *[!0-9]* ]]; then
        __hutch_action=-
    elif (($#)); then
        shift
    fi
    for __hutch_signal; do
        __hutch_found=${__hutch_signal^^}
        case ${__hutch_found#SIG} in
        0 | EXIT) __hutch_trap_shell EXIT ;;
        2 | INT) __hutch_trap_shell INT ;;
        DEBUG) __hutch_trap_code DEBUG "$__hutch_skip_debug" ;;
        RETURN) __hutch_trap_code RETURN "$__hutch_skip_return" ;;
        ERR) __hutch_trap_code ERR '' ;;
        *) __hutch_plain+=("$__hutch_signal") ;;
        esac
    done
    __hutch_call=(:)
    if ((${#__hutch_plain[@]})); then
        __hutch_call=(trap -- "$__hutch_action" "${__hutch_plain[@]}")
    fi
}

__hutch_trap_shell() {
    if [[ $BASHPID != "$$" ]]; then
        __hutch_plain+=("$1")
    elif [[ $__hutch_action == - ]]; then
        builtin unset "__hutch_traps[$1]"
        if [[ $1 == INT ]]; then
            builtin trap -- "$__hutch_on_int" INT
        fi
    else
        __hutch_traps[$1]=$__hutch_action
        if [[ $1 == INT ]]; then
            builtin trap -- "$__hutch_action" INT
        fi
    fi
}

__hutch_trap_code() {
    if [[ $__hutch_action != - ]]; then
        __hutch_traps[$1]=$__hutch_action
        if [[ -n $2 ]]; then
            builtin trap -- "$2${__hutch_action@Q} ;; esac" "$1"
        else
            builtin trap -- "$__hutch_action" "$1"
        fi
    elif [[ -n ${__hutch_traps[$1]+set} ]]; then
        builtin unset "__hutch_traps[$1]"
        builtin trap -- "$__hutch_none" "$1" # without any bash would bring back the old one at the end of this function
    fi
}

__hutch_list() {
    local __hutch_text=$1
    case $1 in
    "$__hutch_on_int" | "$__hutch_none" | "$__hutch_skip_debug"* | "$__hutch_skip_return"*) return 0 ;;
    "$__hutch_on_exit")
        if [[ -z ${__hutch_traps[EXIT]+set} ]]; then
            return 0
        fi
        __hutch_text=${__hutch_traps[EXIT]}
        ;;
    esac
    builtin printf -v __hutch_text 'trap -- %s %s\n' "${__hutch_text@Q}" "$2"
    __hutch_listed+=$__hutch_text
}
