/* Pid 1 of a sandbox, which everything in it descends from and which ends it by ending.
 *
 *   init STATUS LIMITS WRITABLE CMD...   runs one program as its child, reaps, and reports how it really ended.
 *   agent STATUS LIMITS WRITABLE DIR     serves requests that come on a socket until that is closed: start a program,
 *                                        send a signal, open a file of the workspace.
 *
 * Both are undumpable, so that no program can read their memory or open their descriptors, set the limits that count
 * per user namespace, and give up for good to change any file but below WRITABLE, a list of paths with ":" between
 * them, whatever is mounted how. Programs are children of theirs that hold none of these descriptors.
 *
 * A request is one packet of words that end with NUL, with descriptors beside it; hutch alone holds the other end. The
 * first word is the verb, the second a number that the answer repeats:
 *
 *   spawn N TTY      with [words, stdin, stdout, stderr, more...]   ok N PID; later: exit N WAITSTATUS
 *                    words: a file that holds the directory, the number of arguments, the arguments and the variables.
 *                    more become 3, 4, ... TTY is "-", or ROWSxCOLUMNS for a terminal of its own, whose master comes
 *                    with the answer; only [words] is sent then.
 *   signal N OF SIGNAL SCOPE   to what `spawn OF` started: "one", its "group", or its "session"
 *   kill N PID SIGNAL          to any process but ourselves
 *   open N FLAGS MODE PATH     the descriptor comes with the answer
 *   place N PATH     with [file]   a file without a name gets one; what had it is replaced
 *   mkdir N MODE PATH · remove N FLAGS PATH · rename N FROM TO
 *
 * Answers: "ok N VALUE", "failed N ERRNO". Paths are below DIR; no link is followed on the way.
 */

/* Landlock, where the kernel has it: a second layer behind read-only mounts, and no abstract sockets of others. */
static void fence(const char *writable)
{
    const ulong write_file = 1 << 1, refer = 1 << 13, truncate = 1 << 14, make_devices = 1 << 6 | 1 << 11;
    struct {
        ulong files, network, scope;
    } rules = {0x1ff2 /* write, remove, make */, 0, 0};
    struct __attribute__((packed)) {
        ulong allowed;
        int directory;
    } rule;
    long version = CALL(landlock_create_ruleset, 0, 0, 1 /* VERSION */, 0, 0), ruleset;
    if (version < 1)
        return;
    rules.files |= (version >= 2 ? refer : 0) | (version >= 3 ? truncate : 0);
    if (version >= 6)
        rules.scope = 1; /* ABSTRACT_UNIX_SOCKET */
    ruleset = CALL(landlock_create_ruleset, &rules, version >= 6 ? 24 : version >= 4 ? 16 : 8, 0, 0, 0);
    check("landlock", ruleset, "ruleset");
    while (*writable) {
        char path[4200], *to = path;
        struct statx info;
        while (*writable && *writable != ':' && to < path + sizeof path - 1)
            *to++ = *writable++;
        *to = 0;
        writable += *writable == ':';
        rule.directory = (int)CALL(openat, AT_FDCWD, path, O_PATH | O_CLOEXEC, 0, 0);
        if (rule.directory < 0)
            continue;
        rule.allowed = rules.files & ~make_devices;
        if (CALL(statx, rule.directory, "", AT_EMPTY_PATH, STATX_TYPE, &info) == 0 && (info.stx_mode & S_IFMT) != S_IFDIR)
            rule.allowed &= write_file | truncate;
        check("landlock", CALL(landlock_add_rule, ruleset, 1 /* PATH_BENEATH */, &rule, 0, 0), path);
        CALL(close, rule.directory, 0, 0, 0, 0);
    }
    check("landlock", CALL(landlock_restrict_self, ruleset, 0, 0, 0, 0), "restrict");
    CALL(close, ruleset, 0, 0, 0, 0);
}

static void become_pid_1(char **words)
{
    const char *at;
    CALL(prctl, PR_SET_DUMPABLE, 0, 0, 0, 0);
    CALL(umask, 022, 0, 0, 0, 0); /* not that of whoever started hutch */
    CALL(prctl, PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
    /* Who died before that call sends no signal any more. */
    struct pollfd tether = {TETHER_FD, 0, 0};
    long at_once[2] = {0, 0};
    CALL(ppoll, &tether, 1, at_once, 0, 0);
    if (tether.revents & POLLHUP)
        leave(EXIT_FAILED);
    CALL(close, TETHER_FD, 0, 0, 0, 0);
    if (words[0][0] != '-') {
        status_fd = (long)parse(words[0]);
        CALL(fcntl, status_fd, F_SETFD, FD_CLOEXEC, 0, 0);
    }
    for (at = words[1]; *at && *at != '-';) {
        ulong limit[2], resource = number(&at);
        at += *at == '=';
        ulong wanted = number(&at);
        at += *at == ',';
        check("rlimit", CALL(prlimit64, 0, resource, 0, limit, 0), words[1]);
        limit[0] = limit[1] = wanted < limit[1] ? wanted : limit[1]; /* what we came with may be stricter */
        check("rlimit", CALL(prlimit64, 0, resource, limit, 0, 0), words[1]);
    }
    if (words[2][0] != '-')
        fence(words[2]);
}

/* ---- one program ------------------------------------------------------------------------------------------------- */

static int init(int count, char **words, char **environment)
{
    long child;
    if (count < 4)
        return EXIT_FAILED;
    become_pid_1(words);
    report("started", 0);
    child = check("fork", CALL(clone, SIGCHLD, 0, 0, 0, 0), "clone");
    if (!child) {
        long error;
        CALL(setsid, 0, 0, 0, 0, 0);
        error = CALL(execve, words[3], words + 3, environment, 0, 0);
        report("exec", -error);
        leave(127);
    }
    for (;;) {
        int status = 0;
        long pid = CALL(wait4, -1, &status, 0, 0, 0);
        if (pid == child) {
            report("exit", status);
            return (status & 0x7f) ? 128 + (status & 0x7f) : status >> 8 & 0xff;
        }
        if (pid < 0 && pid != -EINTR)
            return EXIT_FAILED;
    }
}

/* ---- the agent: packets ------------------------------------------------------------------------------------------- */

enum { PACKET_BYTES = 16384, PACKET_FDS = 8, PACKET_WORDS = 8, CHILDREN = 1024 };

struct rights {
    ulong size;
    int level, type, fds[PACKET_FDS];
};
struct part {
    void *data;
    ulong size;
};
struct header {
    void *name;
    ulong name_size;
    struct part *parts;
    ulong part_count;
    void *control;
    ulong control_size, flags;
};
struct packet {
    char text[PACKET_BYTES + 1];
    const char *words[PACKET_WORDS];
    int word_count, fds[PACKET_FDS], fd_count;
};

static struct {
    ulong number;
    long pid;
} children[CHILDREN];
static long workspace_fd = -1;

static void close_all(struct packet *packet)
{
    for (int i = 0; i < packet->fd_count; i++)
        CALL(close, packet->fds[i], 0, 0, 0, 0);
    packet->fd_count = 0;
}

/* Whether a whole packet came; no more of them means that hutch is gone. */
static int receive(struct packet *packet)
{
    struct rights rights;
    struct part part = {packet->text, PACKET_BYTES};
    struct header header = {0, 0, &part, 1, &rights, sizeof rights, 0};
    long size;
    memset(&rights, 0, sizeof rights);
    do
        size = CALL(recvmsg, CONTROL_FD, &header, 0x40000000 /* MSG_CMSG_CLOEXEC */, 0, 0);
    while (size == -EINTR);
    packet->fd_count = packet->word_count = 0;
    if (header.control_size >= 16 && rights.level == 1 /* SOL_SOCKET */ && rights.type == 1 /* SCM_RIGHTS */)
        for (ulong n = (rights.size - 16) / sizeof(int); (ulong)packet->fd_count < n; packet->fd_count++)
            packet->fds[packet->fd_count] = rights.fds[packet->fd_count];
    if (size <= 0)
        return 0;
    packet->text[size] = 0;
    for (long at = 0; at < size && packet->word_count < PACKET_WORDS; at += (long)length(packet->text + at) + 1)
        packet->words[packet->word_count++] = packet->text + at;
    return 1;
}

static void answer(const char *word, ulong number, long value, long fd)
{
    char line[64], *end = line + sizeof line - 1, *at;
    struct rights rights = {16 + sizeof(int), 1, 1, {(int)fd}};
    struct part part = {line, 0};
    struct header header = {0, 0, &part, 1, fd < 0 ? 0 : &rights, fd < 0 ? 0 : 24, 0};
    at = append(line, end, word);
    at = append(at, end, " ");
    at = append_number(at, end, (long)number);
    at = append(at, end, " ");
    at = append_number(at, end, value);
    part.size = (ulong)(at - line);
    if (CALL(sendmsg, CONTROL_FD, &header, 0x4000 /* MSG_NOSIGNAL */, 0, 0) < 0)
        leave(EXIT_FAILED);
    if (fd >= 0)
        CALL(close, fd, 0, 0, 0, 0);
}

static void settle_request(ulong number, long result)
{
    if (result < 0)
        answer("failed", number, -result, -1);
    else
        answer("ok", number, result, -1);
}

/* ---- the agent: programs ------------------------------------------------------------------------------------------ */

/* The error that is the most telling of all places of PATH. */
static long execute(char **argv, char **environment)
{
    char path[4200], *end = path + sizeof path - 1;
    const char *places = "/usr/local/bin:/usr/bin:/bin";
    long result, found = -ENOENT;
    for (const char *at = argv[0]; *at; at++)
        if (*at == '/')
            return CALL(execve, argv[0], argv, environment, 0, 0);
    if (!argv[0][0])
        return -ENOENT;
    for (char **variable = environment; *variable; variable++)
        if ((*variable)[0] == 'P' && (*variable)[1] == 'A' && (*variable)[2] == 'T' && (*variable)[3] == 'H' && (*variable)[4] == '=')
            places = *variable + 5;
    for (;; places++) {
        char *to = path;
        while (*places && *places != ':' && to < end - 1)
            *to++ = *places++;
        if (to > path)
            *to++ = '/';
        append(to, end, argv[0]);
        result = CALL(execve, path, argv, environment, 0, 0);
        if (result != -ENOENT && result != -ENOTDIR)
            found = result;
        if (result != -ENOENT && result != -ENOTDIR && result != -EACCES)
            return result;
        if (!*places)
            return found;
    }
}

/* In the child. Returns only what went wrong. */
static long become_program(struct packet *packet, long terminal, long *complaints)
{
    int count, more = packet->fd_count > 4 ? packet->fd_count - 4 : 0;
    long sources[PACKET_FDS], result;
    ulong none = 0;
    char **words = read_words(packet->fds[0], &count);
    CALL(rt_sigprocmask, SIG_SETMASK, &none, 0, SIGNAL_BYTES, 0);
    CALL(setsid, 0, 0, 0, 0, 0);
    if (terminal >= 0) {
        CALL(ioctl, terminal, 0x540e /* TIOCSCTTY */, 0, 0, 0);
        for (int i = 0; i < 3; i++)
            sources[i] = terminal;
    }
    /* First out of the way of each other, then each to its place. */
    for (int i = 0; i < 3 + more; i++) {
        long from = terminal >= 0 ? sources[i] : packet->fds[1 + i];
        sources[i] = CALL(fcntl, from, F_DUPFD_CLOEXEC, 20, 0, 0);
        if (sources[i] < 0)
            return sources[i];
    }
    *complaints = CALL(fcntl, *complaints, F_DUPFD_CLOEXEC, 20, 0, 0);
    for (int i = 0; i < 3 + more; i++)
        CALL(dup3, sources[i], i, 0, 0, 0);
    CALL(close_range, 3 + more, ~0U, CLOSE_RANGE_CLOEXEC, 0, 0);
    if (count < 3)
        return -EINVAL;
    ulong arguments = parse(words[1]);
    if (!arguments || arguments > (ulong)count - 2)
        return -EINVAL;
    for (int i = count; i > 2 + (int)arguments; i--)
        words[i] = words[i - 1];
    words[2 + arguments] = 0;
    words[count + 1] = 0;
    result = CALL(chdir, words[0], 0, 0, 0, 0);
    return result < 0 ? result : execute(words + 2, words + 3 + arguments);
}

/* Both ends of a new terminal: the master is returned. */
static long open_terminal(const char *size, long *slave)
{
    char path[32], *end = path + sizeof path - 1;
    unsigned short window[4] = {0, 0, 0, 0};
    int unlocked = 0, index = 0;
    long result, master = CALL(openat, AT_FDCWD, "/dev/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC, 0, 0);
    if (master < 0)
        return master;
    window[0] = (unsigned short)number(&size);
    size += *size == 'x';
    window[1] = (unsigned short)parse(size);
    CALL(ioctl, master, 0x5414 /* TIOCSWINSZ */, window, 0, 0);
    result = CALL(ioctl, master, 0x40045431 /* TIOCSPTLCK */, &unlocked, 0, 0);
    if (result >= 0)
        result = CALL(ioctl, master, 0x80045430 /* TIOCGPTN */, &index, 0, 0);
    if (result >= 0) {
        append_number(append(path, end, "/dev/pts/"), end, index);
        result = *slave = CALL(openat, AT_FDCWD, path, O_RDWR | O_NOCTTY | O_CLOEXEC, 0, 0);
    }
    if (result >= 0)
        return master;
    CALL(close, master, 0, 0, 0, 0);
    return result;
}

/* What a child says before it is a program: nothing, if it became one. Whoever else runs in here has the uid to stop it
 * on the way, and must not stop us with it. */
static long hear_complaint(int from, long child)
{
    int error = 0;
    for (int round = 0; round < 200; round++) {
        struct pollfd poll = {from, POLLIN, 0};
        long pause[2] = {0, 20000000};
        if (CALL(ppoll, &poll, 1, pause, 0, 0) > 0)
            return CALL(read, from, &error, sizeof error, 0, 0) == sizeof error ? -error : child;
        CALL(kill, child, SIGCONT, 0, 0, 0);
    }
    CALL(kill, child, SIGKILL, 0, 0, 0);
    return -EAGAIN;
}

static void spawn(struct packet *packet, ulong request)
{
    int slot = 0, pipe[2], error = 0;
    long slave = -1, master = -1, child;
    while (slot < CHILDREN && children[slot].pid)
        slot++;
    if (slot == CHILDREN || packet->word_count < 3 || packet->fd_count < 1 || CALL(pipe2, pipe, O_CLOEXEC, 0, 0, 0) < 0) {
        answer("failed", request, slot == CHILDREN ? EAGAIN : EINVAL, -1);
        return;
    }
    if (packet->words[2][0] != '-')
        master = open_terminal(packet->words[2], &slave);
    else if (packet->fd_count < 4)
        master = -EINVAL;
    child = master < -1 ? master : CALL(clone, SIGCHLD, 0, 0, 0, 0);
    if (!child) {
        long complaints = pipe[1];
        status_fd = -1;
        error = (int)-become_program(packet, slave, &complaints);
        write_all(complaints, (char *)&error, sizeof error);
        leave(127);
    }
    CALL(close, pipe[1], 0, 0, 0, 0);
    if (slave >= 0)
        CALL(close, slave, 0, 0, 0, 0);
    if (child > 0)
        child = hear_complaint(pipe[0], child); /* who failed is gone, and will be reaped with the orphans */
    CALL(close, pipe[0], 0, 0, 0, 0);
    if (child < 0) {
        if (master >= 0)
            CALL(close, master, 0, 0, 0, 0);
        answer("failed", request, -child, -1);
        return;
    }
    children[slot].number = request;
    children[slot].pid = child;
    answer("ok", request, child, master);
}

static void reap(void)
{
    int status = 0;
    long pid;
    while ((pid = CALL(wait4, -1, &status, 1 /* WNOHANG */, 0, 0)) > 0)
        for (int i = 0; i < CHILDREN; i++)
            if (children[i].pid == pid) {
                children[i].pid = 0;
                answer("exit", children[i].number, status, -1);
                break;
            }
}

/* The session that a process belongs to, or -1: the fourth field behind the name, which may hold anything. */
static long session_of(const char *pid)
{
    char path[64], text[512], *end = path + sizeof path - 1;
    const char *at = text, *field;
    append(append(append(path, end, "/proc/"), end, pid), end, "/stat");
    long fd = CALL(openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC, 0, 0), n;
    if (fd < 0)
        return -1;
    n = CALL(read, fd, text, sizeof text - 1, 0, 0);
    CALL(close, fd, 0, 0, 0, 0);
    text[n < 0 ? 0 : n] = 0;
    for (field = at; *at; at++)
        if (*at == ')')
            field = at;
    for (int spaces = 0; *field && spaces < 4; field++)
        spaces += *field == ' ';
    return *field ? (long)parse(field) : -1;
}

/* Everything that did not leave the session of a program. Again and again: it may fork meanwhile. */
static void kill_session(long leader, ulong signal)
{
    char buffer[4096];
    int found = 1;
    for (int round = 0; found && round < 20; round++) {
        long n, directory = CALL(openat, AT_FDCWD, "/proc", O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0, 0);
        found = 0;
        while (directory >= 0 && (n = CALL(getdents64, directory, buffer, sizeof buffer, 0, 0)) > 0)
            for (long at = 0; at < n;) {
                struct kdirent *entry = (struct kdirent *)(buffer + at);
                at += entry->size;
                ulong pid = parse(entry->name);
                if (pid > 1 && session_of(entry->name) == leader && CALL(kill, pid, signal, 0, 0, 0) == 0)
                    found = signal == SIGKILL;
            }
        CALL(close, directory, 0, 0, 0, 0);
        reap();
    }
}

static long send_signal(struct packet *packet)
{
    ulong wanted = parse(packet->words[2]), signal = parse(packet->words[3]);
    const char *scope = packet->words[4];
    for (int i = 0; i < CHILDREN; i++)
        if (children[i].pid && children[i].number == wanted) {
            long pid = children[i].pid;
            if (same(scope, "session")) {
                kill_session(pid, signal);
                return 0;
            }
            return CALL(kill, same(scope, "group") ? -pid : pid, signal, 0, 0, 0);
        }
    return -ESRCH;
}

/* ---- the agent: files --------------------------------------------------------------------------------------------- */

/* The directory that a path lies in, and its last name. Step by step, each without following a link: openat2 could do
 * this at once, but where a mount of the host is writable the filter refuses it, for nobody can look into its flags. */
static long open_parent(const char *path, const char **name)
{
    long directory = CALL(fcntl, workspace_fd, F_DUPFD_CLOEXEC, 0, 0, 0);
    for (;;) {
        char part[256], *to = part;
        struct statx info;
        const char *start = path;
        while (*path && *path != '/' && to < part + sizeof part - 1)
            *to++ = *path++;
        *to = 0;
        *name = start;
        if (directory < 0 || !*path)
            return directory;
        long below = *path != '/' ? -ENAMETOOLONG : same(part, "..") || !*part ? -EXDEV : CALL(openat, directory, part, O_PATH_DIR | O_NOFOLLOW, 0, 0);
        if (below == -ENOTDIR && !CALL(statx, directory, part, AT_SYMLINK_NOFOLLOW, STATX_TYPE, &info) && (info.stx_mode & S_IFMT) == S_IFLNK)
            below = -ELOOP;
        CALL(close, directory, 0, 0, 0, 0);
        directory = below;
        path++;
    }
}

static long open_file(const char *flags, const char *mode, const char *path)
{
    const char *name;
    long result, directory = open_parent(path, &name);
    ulong how = parse(flags) | O_CLOEXEC | O_NOFOLLOW;
    if (!(how & O_PATH)) /* neither wait for who is at the other end of a pipe, nor take a terminal */
        how |= O_NONBLOCK | O_NOCTTY;
    if (directory < 0)
        return directory;
    result = same(name, "..") ? -EXDEV : CALL(openat, directory, name, how, parse_octal(mode), 0);
    CALL(close, directory, 0, 0, 0, 0);
    return result;
}

/* A file that was written to its end appears under its name in one step. Until then it has none, so that whoever is
 * killed meanwhile leaves nothing. Only where it replaces another is there another name, for as long as two calls take. */
static long place_file(long file, const char *path, ulong request)
{
    char own[64], other[64], *end = own + sizeof own - 1;
    const char *name;
    long result, directory = open_parent(path, &name);
    if (directory < 0)
        return directory;
    append_number(append(own, end, "/proc/self/fd/"), end, file);
    append_number(append(other, other + sizeof other - 1, ".hutch-"), other + sizeof other - 1, (long)request);
    result = same(name, "..") || same(name, ".") || !*name ? -EXDEV : CALL(linkat, AT_FDCWD, own, directory, name, AT_SYMLINK_FOLLOW);
    if (result == -EEXIST) {
        CALL(unlinkat, directory, other, 0, 0, 0);
        result = CALL(linkat, AT_FDCWD, own, directory, other, AT_SYMLINK_FOLLOW);
        if (!result) {
            result = CALL(renameat2, directory, other, directory, name, 0);
            if (result < 0)
                CALL(unlinkat, directory, other, 0, 0, 0);
        }
    }
    CALL(close, directory, 0, 0, 0, 0);
    return result;
}

static long change(struct packet *packet)
{
    const char *name, *target, *verb = packet->words[0], *path = packet->words[packet->word_count - 1];
    long result, directory = open_parent(path, &name), from;
    if (directory < 0)
        return directory;
    if (same(name, "..") || same(name, ".") || !*name) {
        result = -EXDEV;
    } else if (same(verb, "mkdir")) {
        result = CALL(mkdirat, directory, name, parse_octal(packet->words[2]), 0, 0);
    } else if (same(verb, "remove")) {
        result = CALL(unlinkat, directory, name, parse(packet->words[2]), 0, 0);
    } else {
        from = open_parent(packet->words[2], &target);
        result = from < 0 ? from : CALL(renameat2, from, target, directory, name, 0);
        if (from >= 0)
            CALL(close, from, 0, 0, 0, 0);
    }
    CALL(close, directory, 0, 0, 0, 0);
    return result;
}

/* ---- the agent: serving ------------------------------------------------------------------------------------------- */

static void serve(struct packet *packet)
{
    const char *verb = packet->words[0];
    ulong request = packet->word_count > 1 ? parse(packet->words[1]) : 0;
    if (same(verb, "spawn")) {
        spawn(packet, request);
    } else if (same(verb, "signal") && packet->word_count == 5) {
        settle_request(request, send_signal(packet));
    } else if (same(verb, "kill") && packet->word_count == 4) {
        ulong pid = parse(packet->words[2]);
        settle_request(request, pid < 2 ? -EPERM : CALL(kill, pid, parse(packet->words[3]), 0, 0, 0));
    } else if (same(verb, "open") && packet->word_count == 5) {
        long fd = open_file(packet->words[2], packet->words[3], packet->words[4]);
        if (fd < 0)
            answer("failed", request, -fd, -1);
        else
            answer("ok", request, 0, fd);
    } else if (same(verb, "place") && packet->word_count == 3 && packet->fd_count == 1) {
        settle_request(request, place_file(packet->fds[0], packet->words[2], request));
    } else if ((same(verb, "mkdir") || same(verb, "remove") || same(verb, "rename")) && packet->word_count == 4) {
        settle_request(request, change(packet));
    } else {
        answer("failed", request, EINVAL, -1);
    }
    close_all(packet);
}

static int agent(int count, char **words)
{
    static struct packet packet;
    struct pollfd polls[2];
    ulong wanted = 1UL << (SIGCHLD - 1);
    char buffer[128];
    if (count < 4)
        return EXIT_FAILED;
    become_pid_1(words);
    CALL(fcntl, CONTROL_FD, F_SETFD, FD_CLOEXEC, 0, 0);
    workspace_fd = check("workspace", CALL(openat, AT_FDCWD, words[3], O_PATH_DIR, 0, 0), words[3]);
    CALL(rt_sigprocmask, SIG_SETMASK, &wanted, 0, SIGNAL_BYTES, 0);
    polls[0].fd = (int)check("signals", CALL(signalfd4, -1, &wanted, SIGNAL_BYTES, O_CLOEXEC | O_NONBLOCK, 0), "signalfd");
    polls[1].fd = CONTROL_FD;
    polls[0].events = polls[1].events = POLLIN;
    report("started", 0);
    for (;;) {
        CALL(ppoll, polls, 2, 0, 0, 0);
        if (polls[0].revents) {
            while (CALL(read, polls[0].fd, buffer, sizeof buffer, 0, 0) > 0)
                ;
            reap();
        }
        if (polls[1].revents) {
            if (!receive(&packet))
                return 0;
            serve(&packet);
        }
    }
}
