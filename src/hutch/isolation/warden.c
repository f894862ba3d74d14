/* hutch-warden: what stands around one sandbox. Freestanding C, no libc, one program for x86_64 and aarch64.
 *
 * It has three faces, told apart by the first argument:
 *
 *   warden [--args FD] OP...   outside. Forks a child that carries out the operations in order (join cgroups, unshare,
 *                              stage mounts, drop the uid) and becomes bubblewrap. The parent stays: it ends the
 *                              sandbox when hutch dies, waits until every process of it is gone, and then removes
 *                              what the run left on the host. One clean-up path, whichever way the run ended.
 *   init ...                   inside, as pid 1: runs one program (init.c).
 *   agent ...                  inside, as pid 1: starts programs when it is told to (init.c).
 *
 * What follows "--args FD" is not read: it tells whoever lists processes what this sandbox is.
 *
 * Reports are lines on the status descriptor: "child PID", "hold PID", "error OP ERRNO TEXT" (outside), "started",
 * "exec ERRNO", "exit WAITSTATUS" (init), "ended WAITSTATUS" (outside). The program never holds that descriptor.
 *
 * Every path that comes from a user is opened with openat2 and RESOLVE_NO_SYMLINKS and then used by descriptor, so
 * nothing that is swapped for a link between check and use can redirect a mount (see CVE-2026-87766 for the class).
 */
#include "freestanding.h"
#include "init.c"

/* ---- operations of the outer child ----------------------------------------------------------------------------- */

static void write_map(long pid, const char *name, ulong inside, ulong outside, ulong also_inside, int also)
{
    char path[64], map[128], *end = path + sizeof path - 1, *at;
    at = append(path, end, "/proc/");
    at = pid ? append_number(at, end, pid) : append(at, end, "self");
    at = append(at, end, "/");
    append(at, end, name);
    end = map + sizeof map - 1;
    at = append_number(map, end, (long)inside);
    at = append(at, end, " ");
    at = append_number(at, end, (long)outside);
    at = append(at, end, " 1\n");
    if (also) {
        at = append_number(at, end, (long)also_inside);
        at = append(at, end, " 0 1\n");
    }
    check("map", write_file(path, map), path);
}

/* A user namespace that exists only as a mapping for idmapped mounts: ids on disk `uid`, `gid` appear as the host's
 * `to_uid`, `to_gid`. The second line maps the mounting root itself; without it overlayfs cannot create its work
 * directory and silently mounts read-only. */
static void make_idmap(ulong uid, ulong gid, ulong to_uid, ulong to_gid)
{
    int up[2], down[2];
    long child;
    char byte = 0, path[64], *at;
    check("idmap", CALL(pipe2, up, O_CLOEXEC, 0, 0, 0), "pipe");
    check("idmap", CALL(pipe2, down, O_CLOEXEC, 0, 0, 0), "pipe");
    child = check("idmap", CALL(clone, SIGCHLD, 0, 0, 0, 0), "fork");
    if (!child) {
        CALL(prctl, PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
        CALL(close, down[1], 0, 0, 0, 0);
        byte = (char)(CALL(unshare, CLONE_NEWUSER, 0, 0, 0, 0) < 0);
        write_all(up[1], &byte, 1);
        CALL(read, down[0], &byte, 1, 0, 0);
        leave(0);
    }
    CALL(close, up[1], 0, 0, 0, 0);
    if (CALL(read, up[0], &byte, 1, 0, 0) != 1 || byte)
        fail("idmap", EPERM, "unshare user");
    write_map(child, "uid_map", uid, to_uid, to_uid, uid != to_uid && to_uid);
    write_map(child, "gid_map", gid, to_gid, to_gid, gid != to_gid && to_gid);
    at = append(path, path + sizeof path - 1, "/proc/");
    at = append_number(at, path + sizeof path - 1, child);
    append(at, path + sizeof path - 1, "/ns/user");
    place(check("idmap", CALL(openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC, 0, 0), path), IDMAP_FD);
    CALL(close, down[1], 0, 0, 0, 0);
    CALL(close, down[0], 0, 0, 0, 0);
    CALL(close, up[0], 0, 0, 0, 0);
    CALL(wait4, child, 0, 0, 0, 0);
}

static void unshare(const char *list)
{
    ulong flags = 0, uid = (ulong)CALL(getuid, 0, 0, 0, 0, 0), gid = (ulong)CALL(getgid, 0, 0, 0, 0, 0);
    if (has(list, "user"))
        flags |= CLONE_NEWUSER;
    if (has(list, "mount"))
        flags |= CLONE_NEWNS;
    if (has(list, "net"))
        flags |= CLONE_NEWNET;
    /* A process that changed its uid is undumpable and may not write its own maps. */
    CALL(prctl, PR_SET_DUMPABLE, 1, 0, 0, 0);
    check("unshare", CALL(unshare, flags, 0, 0, 0, 0), list);
    if (flags & CLONE_NEWUSER) {
        check("map", write_file("/proc/self/setgroups", "deny"), "setgroups");
        write_map(0, "uid_map", uid, uid, 0, 0);
        write_map(0, "gid_map", gid, gid, 0, 0);
    }
    if (flags & CLONE_NEWNS)
        check("unshare", CALL(mount, 0, "/", 0, MS_REC | MS_PRIVATE, 0), "make / private");
}

/* Whether a file is the one that was looked at before: device as "major:minor", inode as a number or "-" for any. */
static int is_same_file(long fd, const char *device, const char *inode)
{
    struct statx now;
    if (CALL(statx, fd, "", AT_EMPTY_PATH, STATX_BASIC_STATS, &now) < 0)
        return 0;
    if (*device != '-') {
        ulong major = number(&device);
        device += *device == ':';
        if (now.stx_dev_major != major || now.stx_dev_minor != parse(device))
            return 0;
    }
    return *inode == '-' || now.stx_ino == parse(inode);
}

/* Opens a path without following any link, and only if it is still the file that was checked. */
static long open_pinned(const char *path, const char *device, const char *inode, ulong flags)
{
    long fd = check("pin", open_beneath(AT_FDCWD, path, flags, RESOLVE_NO_SYMLINKS), path);
    if (!is_same_file(fd, device, inode))
        fail("pin", ESTALE, path);
    return fd;
}

static void set_attributes(long tree, const char *flags)
{
    struct mount_attr attr = {MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV, 0, 0, 0};
    if (has(flags, "ro"))
        attr.attr_set |= MOUNT_ATTR_RDONLY;
    if (has(flags, "idmap") || has(flags, "try-idmap")) {
        attr.attr_set |= MOUNT_ATTR_IDMAP;
        attr.userns_fd = IDMAP_FD;
    }
    ulong depth = AT_EMPTY_PATH | (has(flags, "flat") ? 0 : AT_RECURSIVE);
    long result = CALL(mount_setattr, tree, "", depth, &attr, sizeof attr);
    int impossible = result == -EINVAL || result == -EOPNOTSUPP || result == -EPERM;
    if (impossible && has(flags, "try-idmap")) { /* only ever asked for where doing without means less access */
        attr.attr_set &= ~(ulong)MOUNT_ATTR_IDMAP;
        result = CALL(mount_setattr, tree, "", depth, &attr, sizeof attr);
    }
    check(attr.attr_set & MOUNT_ATTR_IDMAP ? "idmap-mount" : "attributes", result, flags);
}

static void clone_mount(long from, const char *to, const char *flags)
{
    ulong recursive = has(flags, "flat") ? 0 : AT_RECURSIVE;
    long tree = check("clone",
                      CALL(open_tree, from, "", AT_EMPTY_PATH | OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | recursive, 0, 0),
                      to);
    set_attributes(tree, flags);
    check("clone", CALL(move_mount, tree, "", AT_FDCWD, to, MOVE_MOUNT_F_EMPTY_PATH), to);
    CALL(close, tree, 0, 0, 0, 0);
}

static void mount_overlay(const char *to, const char *lower, const char *upper_fd, const char *work_fd,
                          const char *flags)
{
    char options[512], *end = options + sizeof options - 1, *at;
    struct kstatfs stat;
    /* Layers are named by descriptor: no project name ends up in the option string, where a comma would split it, nor
     * in the /proc/self/mountinfo that the program can read. */
    at = append(options, end, "lowerdir=");
    at = append(at, end, lower);
    at = append(at, end, ",upperdir=/proc/self/fd/");
    at = append(at, end, upper_fd);
    at = append(at, end, ",workdir=/proc/self/fd/");
    at = append(at, end, work_fd);
    /* A merged directory must not be renamed: what is masked below it would go along, and a new one could be made. */
    at = append(at, end, ",redirect_dir=nofollow,metacopy=off,index=off");
    if (has(flags, "userxattr"))
        at = append(at, end, ",userxattr");
    /* Linux 6.6 began to mark the upper directory with a uuid, and to know how to be told not to. */
    append(at, end, ",uuid=null");
    long result = CALL(mount, "hutch", to, "overlay", OVERLAY_FLAGS, options);
    if (result == -EINVAL) {
        *at = 0;
        result = CALL(mount, "hutch", to, "overlay", OVERLAY_FLAGS, options);
    }
    check("overlay", result, to);
    check("overlay", CALL(statfs, to, &stat, 0, 0, 0), to);
    if (stat.flags & MS_RDONLY)
        fail("overlay", EROFS, to);
}

/* Makes one path below `base` a mount point of its own, read-only or not. Everything by descriptor: nothing is
 * created and no link is followed on the way. */
static void mask(const char *base, const char *path, const char *flags)
{
    long directory = check("mask", CALL(openat, AT_FDCWD, base, O_PATH_DIR, 0, 0), base);
    long target = check("mask", open_beneath(directory, path, O_PATH | O_NOFOLLOW, RESOLVE_NO_SYMLINKS | RESOLVE_BENEATH),
                        path);
    struct statx info;
    long tree;
    check("mask", CALL(statx, target, "", AT_EMPTY_PATH, STATX_TYPE, &info), path);
    if ((info.stx_mode & S_IFMT) != S_IFDIR && (info.stx_mode & S_IFMT) != S_IFREG)
        fail("mask", ELOOP, path);
    tree = check("mask", CALL(open_tree, target, "", AT_EMPTY_PATH | OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_RECURSIVE, 0, 0),
                 path);
    set_attributes(tree, flags);
    check("mask", CALL(move_mount, tree, "", target, "", MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH), path);
    CALL(close, tree, 0, 0, 0, 0);
    CALL(close, target, 0, 0, 0, 0);
    CALL(close, directory, 0, 0, 0, 0);
}

static void drop(ulong uid, ulong gid)
{
    check("drop", CALL(setgroups, 0, 0, 0, 0, 0), "setgroups");
    check("drop", CALL(setresgid, gid, gid, gid, 0, 0), "setresgid");
    check("drop", CALL(setresuid, uid, uid, uid, 0, 0), "setresuid");
}

static void die_with(long parent)
{
    /* Every change of credentials clears this, so it is asked for again after each. */
    CALL(prctl, PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
    if (CALL(getppid, 0, 0, 0, 0, 0) != parent)
        leave(EXIT_FAILED);
}

static void keep_open(const char *text)
{
    CALL(fcntl, parse(text), F_SETFD, 0, 0, 0);
}

/* The options go through a memfd: on the command line every user of the host could read paths and variables. */
static __attribute__((noreturn)) void become_bwrap(char **words, int count)
{
    static char args_number[24];
    static char *argv[4096];
    long options = (long)parse(words[0]) + 1; /* counted, not searched for: a value may be "--" */
    int n = 0;
    long args;
    words++;
    count--;
    if (options >= count || count - options > 4000)
        fail("bwrap", EINVAL, "no command, or one of more than 4000 words");
    args = check("bwrap", CALL(memfd_create, "args", 1 /* MFD_CLOEXEC */, 0, 0, 0), "memfd");
    for (long i = 1; i < options; i++)
        check("bwrap", write_all(args, words[i], length(words[i]) + 1), "memfd");
    check("bwrap", CALL(lseek, args, 0, 0, 0, 0), "memfd");
    CALL(fcntl, args, F_SETFD, 0, 0, 0);
    append_number(args_number, args_number + sizeof args_number - 1, args);
    argv[n++] = "bwrap";
    argv[n++] = "--args";
    argv[n++] = args_number;
    argv[n++] = "--";
    for (long i = options; i < count; i++)
        argv[n++] = words[i];
    argv[n] = 0;
    char *environment[] = {0};
    fail("bwrap", CALL(execve, words[0], argv, environment, 0, 0), words[0]);
}

static int arity(const char *op)
{
    static const struct {
        const char *name;
        int words;
    } table[] = {
        {"status", 1}, {"lifeline", 1}, {"gate", 1},  {"cgroup", 1},  {"scrub", 3},   {"remove", 1}, {"oom", 1},
        {"file", 2},   {"text", 2},     {"pin", 4},   {"unshare", 1}, {"stage", 2},   {"mkdir", 2},  {"write", 3},
        {"idmap", 4},  {"clone", 3},    {"overlay", 5}, {"mask", 3},  {"detach", 1},  {"drop", 2},   {"hold", 0},
        {"keep", 1},   {"affinity", 1}, {"refresh", 1}, {"deadline", 1}, {"own", 3}, {"unreachable", 2}, {"control", 1},
    };
    for (ulong i = 0; i < sizeof table / sizeof *table; i++)
        if (same(op, table[i].name))
            return table[i].words;
    return -1;
}

static void scrub_one(long fd)
{
    static const char *const names[] = {"impure", "origin", "opaque", "redirect", "uuid", "nlink", "upper", "protattr"};
    static const char *const prefixes[] = {"user.overlay.", "trusted.overlay.", "user.overlay.overlay."};
    char name[64], *end = name + sizeof name - 1;
    if (CALL(flistxattr, fd, 0, 0, 0, 0) <= 0)
        return;
    for (ulong p = 0; p < sizeof prefixes / sizeof *prefixes; p++)
        for (ulong i = 0; i < sizeof names / sizeof *names; i++) {
            append(append(name, end, prefixes[p]), end, names[i]);
            CALL(fremovexattr, fd, name, 0, 0, 0);
        }
}

static void scrub_tree(long fd, int depth, long *left)
{
    char buffer[2048];
    long n;
    scrub_one(fd);
    while (depth && (n = CALL(getdents64, fd, buffer, sizeof buffer, 0, 0)) > 0)
        for (long at = 0; at < n;) {
            struct kdirent *entry = (struct kdirent *)(buffer + at);
            at += entry->size;
            if (same(entry->name, ".") || same(entry->name, "..") || (entry->type != 4 && entry->type != 0))
                continue;
            if (--*left < 0)
                return;
            long child = CALL(openat, fd, entry->name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC, 0, 0);
            if (child < 0)
                continue;
            scrub_tree(child, depth - 1, left);
            CALL(close, child, 0, 0, 0, 0);
        }
}

/* overlayfs marks the directories it merges, and directories renamed into those, which may have moved on since. Before
 * a mount no mark may be there, for it would be obeyed; after it none is to stay. */
static void scrub(const char *path, const char *device, const char *inode)
{
    long left = 100000, fd = open_beneath(AT_FDCWD, path, O_RDONLY | O_DIRECTORY, RESOLVE_NO_SYMLINKS);
    if (fd < 0)
        return;
    if (is_same_file(fd, device, inode))
        scrub_tree(fd, 64, &left);
    CALL(close, fd, 0, 0, 0, 0);
}

/* A route to nowhere, in a network namespace that is ours: the program has no capability to take it away again. */
static void make_unreachable(const char *address, ulong prefix)
{
    struct {
        uint size;
        unsigned short type, flags;
        uint sequence, port;
        unsigned char family, to_length, from_length, tos, table, protocol, scope, kind;
        uint route_flags;
        unsigned short attribute_size, attribute;
        unsigned char to[4];
    } request = {36, 24 /* RTM_NEWROUTE */, 0x505 /* REQUEST ACK CREATE REPLACE */, 1, 0,
                 2 /* AF_INET */, (unsigned char)prefix, 0, 0, 254 /* main */, 4 /* static */, 0, 7 /* unreachable */, 0, 8, 1, {0}};
    struct {
        uint size;
        unsigned short type, flags;
        uint sequence, port;
        int error;
        char rest[1024];
    } answer;
    const char *at = address;
    for (int i = 0; i < 4; i++, at += *at == '.')
        request.to[i] = (unsigned char)number(&at);
    long fd = check("unreachable", CALL(socket, 16 /* AF_NETLINK */, 3 | 02000000 /* RAW, CLOEXEC */, 0, 0, 0), address);
    check("unreachable", CALL(write, fd, &request, sizeof request, 0, 0), address);
    check("unreachable", CALL(read, fd, &answer, sizeof answer, 0, 0), address);
    CALL(close, fd, 0, 0, 0, 0);
    if (answer.type == 2 /* NLMSG_ERROR */ && answer.error)
        fail("unreachable", answer.error, address);
}

/* Splits in two. The child goes on to become the sandbox; the parent stays behind in the mount namespace in which the
 * overlays were made and remounts them once a second, which makes overlayfs forget the names it has looked up: without
 * that, what is edited on the host meanwhile would not be seen inside. Returns the child's new parent. */
static long refresh(const char *mounts, long parent)
{
    long self = CALL(getpid, 0, 0, 0, 0, 0), child = check("refresh", CALL(clone, SIGCHLD, 0, 0, 0, 0), "fork");
    ulong wanted = 1UL << (SIGCHLD - 1);
    int status = 0;
    if (!child) {
        die_with(self);
        return self;
    }
    die_with(parent);
    CALL(close_range, 0, ~0U, 0, 0, 0);
    CALL(rt_sigprocmask, SIG_BLOCK, &wanted, 0, SIGNAL_BYTES, 0);
    for (;;) {
        long pid = CALL(wait4, child, &status, 1 /* WNOHANG */, 0, 0);
        if (pid == child || pid == -ECHILD)
            leave((status & 0x7f) ? 128 + (status & 0x7f) : status >> 8 & 0xff);
        long pause[2] = {1, 0};
        if (CALL(rt_sigtimedwait, &wanted, 0, pause, SIGNAL_BYTES, 0) == SIGCHLD)
            continue;
        for (const char *at = mounts; *at; at += *at == ',') {
            char path[256], *to = path;
            while (*at && *at != ',' && to < path + sizeof path - 1)
                *to++ = *at++;
            *to = 0;
            CALL(mount, 0, path, 0, MS_REMOUNT | OVERLAY_FLAGS, 0);
        }
    }
}

static __attribute__((noreturn)) void prepare(char **words, int count, long parent, long gate)
{
    int i = 0;
    CALL(setpgid, 0, 0, 0, 0, 0); /* here and in the parent: whoever comes first, the group exists when it is killed */
    reset_signals();
    die_with(parent);
    while (i < count) {
        const char *op = words[i];
        char **a = words + i + 1;
        if (same(op, "bwrap"))
            break;
        i += 1 + arity(op);
        if (same(op, "cgroup")) {
            char path[4200], *end = path + sizeof path - 1;
            append(append(path, end, a[0]), end, "/cgroup.procs");
            check("cgroup", write_file(path, "0"), path);
        } else if (same(op, "oom")) {
            write_file("/proc/self/oom_score_adj", a[0]); /* lower is refused, and harmless */
        } else if (same(op, "affinity")) {
            ulong set[16] = {0};
            for (const char *at = a[0]; *at; at += *at == ',') {
                ulong cpu = number(&at);
                if (cpu < 1024)
                    set[cpu / 64] |= 1UL << cpu % 64;
            }
            check("affinity", CALL(sched_setaffinity, 0, sizeof set, set, 0, 0), a[0]);
        } else if (same(op, "file")) {
            place(check("file", CALL(openat, AT_FDCWD, a[1], O_RDONLY | O_CLOEXEC, 0, 0), a[1]), (long)parse(a[0]));
        } else if (same(op, "text")) {
            long fd = check("text", CALL(memfd_create, "text", 1 /* MFD_CLOEXEC */, 0, 0, 0), "memfd");
            check("text", write_all(fd, a[1], length(a[1])), "memfd");
            check("text", CALL(lseek, fd, 0, 0, 0, 0), "memfd");
            place(fd, (long)parse(a[0]));
        } else if (same(op, "pin")) {
            place(open_pinned(a[1], a[2], a[3], O_PATH), (long)parse(a[0]));
        } else if (same(op, "unshare")) {
            unshare(a[0]);
            die_with(parent);
        } else if (same(op, "stage")) {
            check("stage", CALL(mount, "hutch", a[0], "tmpfs", MS_NOSUID | MS_NODEV, a[1]), a[0]);
        } else if (same(op, "mkdir")) {
            check("mkdir", CALL(mkdirat, AT_FDCWD, a[0], parse_octal(a[1]), 0, 0), a[0]);
        } else if (same(op, "write")) {
            long fd = check("write", CALL(openat, AT_FDCWD, a[0], O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, parse_octal(a[1]), 0), a[0]);
            check("write", write_all(fd, a[2], length(a[2])), a[0]);
            CALL(close, fd, 0, 0, 0, 0);
        } else if (same(op, "idmap")) {
            make_idmap(parse(a[0]), parse(a[1]), parse(a[2]), parse(a[3]));
        } else if (same(op, "clone")) {
            clone_mount((long)parse(a[0]), a[1], a[2]);
        } else if (same(op, "overlay")) {
            mount_overlay(a[0], a[1], a[2], a[3], a[4]);
        } else if (same(op, "mask")) {
            mask(a[0], a[1], a[2]);
        } else if (same(op, "detach")) {
            check("detach", CALL(umount2, a[0], MNT_DETACH, 0, 0, 0), a[0]);
        } else if (same(op, "scrub")) {
            scrub(a[0], a[1], a[2]);
        } else if (same(op, "own")) {
            check("own", CALL(fchownat, AT_FDCWD, a[0], parse(a[1]), parse(a[2]), AT_SYMLINK_NOFOLLOW), a[0]);
        } else if (same(op, "unreachable")) {
            make_unreachable(a[0], parse(a[1]));
        } else if (same(op, "refresh")) {
            parent = refresh(a[0], parent);
        } else if (same(op, "drop")) {
            drop(parse(a[0]), parse(a[1]));
            die_with(parent);
        } else if (same(op, "hold")) {
            char byte;
            report("hold", CALL(getpid, 0, 0, 0, 0, 0));
            if (gate < 0 || CALL(read, gate, &byte, 1, 0, 0) != 1)
                leave(EXIT_FAILED);
        }
    }
    check("descriptors", CALL(close_range, 3, ~0U, CLOSE_RANGE_CLOEXEC, 0, 0), "close_range");
    for (int k = 0; k < i;) { /* these, and no others, reach bubblewrap */
        if (same(words[k], "keep"))
            keep_open(words[k + 1]);
        k += 1 + arity(words[k]);
    }
    if (status_fd >= 0)
        CALL(fcntl, status_fd, F_SETFD, 0, 0, 0);
    CALL(fcntl, TETHER_FD, F_SETFD, 0, 0, 0);
    CALL(fcntl, CONTROL_FD, F_SETFD, 0, 0, 0); /* there where the sandbox has an agent */
    die_with(parent);
    become_bwrap(words + i + 1, count - i - 1);
}

/* ---- clean-up, by the outer parent -------------------------------------------------------------------------------- */

/* overlayfs leaves its work directory with mode 000. Never done for root, who needs no permission, and whose change of
 * mode somebody else's link could send elsewhere. */
static void unlock(long directory, const char *name)
{
    char path[64], *end = path + sizeof path - 1;
    long fd = CALL(openat, directory, name, O_PATH_DIR | O_NOFOLLOW, 0, 0);
    if (fd < 0)
        return;
    append_number(append(path, end, "/proc/self/fd/"), end, fd);
    CALL(fchmodat, AT_FDCWD, path, 0700, 0, 0);
    CALL(close, fd, 0, 0, 0, 0);
}

static void remove_tree(long directory, const char *name, int depth)
{
    char buffer[4096];
    long fd, n;
    if (CALL(geteuid, 0, 0, 0, 0, 0))
        unlock(directory, name);
    fd = CALL(openat, directory, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC, 0, 0);
    if (fd >= 0) {
        while (depth && (n = CALL(getdents64, fd, buffer, sizeof buffer, 0, 0)) > 0)
            for (long at = 0; at < n;) {
                struct kdirent *entry = (struct kdirent *)(buffer + at);
                at += entry->size;
                if (same(entry->name, ".") || same(entry->name, ".."))
                    continue;
                if (CALL(unlinkat, fd, entry->name, 0, 0, 0) == -EISDIR)
                    remove_tree(fd, entry->name, depth - 1);
            }
        CALL(close, fd, 0, 0, 0, 0);
    }
    CALL(unlinkat, directory, name, AT_REMOVEDIR, 0, 0);
}

static void clean_up(char **words, int count)
{
    for (int i = 0; i < count;) {
        char **a = words + i + 1;
        if (same(words[i], "bwrap"))
            break;
        if (same(words[i], "cgroup")) {
            /* All processes are gone; the kernel may need a moment to agree. */
            for (int attempt = 0; attempt < 400; attempt++) {
                long result = CALL(unlinkat, AT_FDCWD, a[0], AT_REMOVEDIR, 0, 0);
                if (!result || result == -ENOENT)
                    break;
                sleep_ms(attempt < 20 ? 1 : 5);
            }
        } else if (same(words[i], "remove")) {
            remove_tree(AT_FDCWD, a[0], 8);
        } else if (same(words[i], "scrub")) {
            scrub(a[0], a[1], a[2]);
        }
        i += 1 + arity(words[i]);
    }
}

/* ---- the outer parent ----------------------------------------------------------------------------------------------- */

/* First out of the way of each other, then each to its place: any of them may have the number of another's place. */
static long lift(const char *text)
{
    return check("descriptor", CALL(fcntl, parse(text), F_DUPFD_CLOEXEC, FREE_FD, 0, 0), text);
}

static long settle(long fd, long to)
{
    if (fd >= 0)
        place(fd, to);
    return fd >= 0 ? to : -1;
}

static ulong now_ms(void)
{
    long time[2] = {0, 0};
    CALL(clock_gettime, 1 /* CLOCK_MONOTONIC */, time, 0, 0, 0);
    return (ulong)time[0] * 1000 + (ulong)time[1] / 1000000;
}

/* Orphans of a bubblewrap that died before its child asked to die with it come to us, their subreaper. */
static void kill_children(long self)
{
    char path[64], list[4096], *end = path + sizeof path - 1;
    long fd, n;
    append(append_number(append(path, end, "/proc/self/task/"), end, self), end, "/children");
    fd = CALL(openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC, 0, 0);
    n = fd < 0 ? 0 : CALL(read, fd, list, sizeof list - 1, 0, 0);
    list[n < 0 ? 0 : n] = 0;
    for (const char *at = list; *at;) {
        ulong pid = number(&at);
        if (pid)
            CALL(kill, pid, SIGKILL, 0, 0, 0);
        else
            at++;
    }
    if (fd >= 0)
        CALL(close, fd, 0, 0, 0, 0);
}

static int watch(char **words, int count)
{
    struct pollfd polls[2];
    ulong all = ~0UL;
    long status = -1, lifeline = -1, gate = -1, control = -1, parent, child, signals;
    ulong deadline = 0; /* kept here as well, for a hutch that is stopped or waits for its reader */
    int code = EXIT_FAILED, i = 0, released, tether[2];
    char buffer[128];

    for (; i < count && !same(words[i], "bwrap"); i += 1 + arity(words[i])) {
        int n = arity(words[i]);
        if (n < 0 || i + n >= count)
            fail("parse", EINVAL, words[i]);
        if (same(words[i], "status"))
            status = lift(words[i + 1]);
        else if (same(words[i], "lifeline"))
            lifeline = lift(words[i + 1]);
        else if (same(words[i], "gate"))
            gate = lift(words[i + 1]);
        else if (same(words[i], "control"))
            control = lift(words[i + 1]);
        else if (same(words[i], "deadline"))
            deadline = now_ms() + parse(words[i + 1]);
    }
    if (i >= count)
        fail("parse", EINVAL, "no bwrap operation");
    status_fd = settle(status, STATUS_FD);
    lifeline = settle(lifeline, LIFELINE_FD);
    gate = settle(gate, GATE_FD);
    control = settle(control, CONTROL_FD);
    /* Whatever hutch was started with stays outside: close all but the standard three and the raised ones. */
    check("descriptors", CALL(close_range, 3, STATUS_FD - 1, 0, 0, 0), "close_range");
    check("descriptors", CALL(close_range, GATE_FD + 1, CONTROL_FD - 1, 0, 0, 0), "close_range");
    check("descriptors", CALL(close_range, CONTROL_FD + 1, ~0U, 0, 0, 0), "close_range");

    reset_signals(); /* an ignored SIGCHLD would take the children's ends from us */
    CALL(setsid, 0, 0, 0, 0, 0); /* Ctrl-C is hutch's to judge */
    CALL(prctl, PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
    CALL(rt_sigprocmask, SIG_SETMASK, &all, 0, SIGNAL_BYTES, 0);
    /* The death signal follows the thread that started us, not its process: USR1 means "look again". */
    CALL(prctl, PR_SET_PDEATHSIG, SIGUSR1, 0, 0, 0);
    parent = CALL(getppid, 0, 0, 0, 0, 0);
    signals = check("signals", CALL(signalfd4, -1, &all, SIGNAL_BYTES, O_CLOEXEC | O_NONBLOCK, 0), "signalfd");

    /* Whether we are still there is asked of this by pid 1, which cannot see its parents. */
    check("tether", CALL(pipe2, tether, O_CLOEXEC, 0, 0, 0), "pipe");
    long self = CALL(getpid, 0, 0, 0, 0, 0);
    child = check("fork", CALL(clone, SIGCHLD, 0, 0, 0, 0), "clone");
    if (!child) {
        CALL(close, tether[1], 0, 0, 0, 0);
        place(tether[0], TETHER_FD);
        if (lifeline >= 0)
            CALL(close, lifeline, 0, 0, 0, 0);
        CALL(close, signals, 0, 0, 0, 0);
        prepare(words, count, self, gate);
    }
    CALL(close, tether[0], 0, 0, 0, 0);
    CALL(setpgid, child, child, 0, 0, 0);
    report("child", child);
    if (gate >= 0)
        CALL(close, gate, 0, 0, 0, 0);
    if (control >= 0)
        CALL(close, control, 0, 0, 0, 0);
    CALL(close_range, 0, 2, 0, 0, 0); /* whoever reads the output sees its end when the sandbox is gone */

    polls[0].fd = (int)signals;
    polls[0].events = POLLIN;
    polls[1].fd = (int)lifeline; /* -1 is ignored by poll */
    polls[1].events = POLLIN;
    released = lifeline < 0;
    for (int alive = 1, kill = 0, reaped = 0; alive || !released;) {
        int how;
        ulong now = now_ms(), wait = alive && deadline ? (now < deadline ? deadline - now : 0) : ~0UL;
        if (alive && kill)
            wait = 10; /* an orphan may come to us unannounced */
        long pause[2] = {(long)(wait / 1000), (long)(wait % 1000) * 1000000};
        CALL(ppoll, polls, 2, wait == ~0UL ? 0 : pause, 0, 0);
        if (alive && !kill && deadline && now_ms() >= deadline) {
            report("deadline", 0);
            kill = 1;
        }
        if (polls[1].revents) {
            released = 1;
            kill = 1;
            polls[1].fd = -1;
        }
        while (CALL(read, signals, buffer, sizeof buffer, 0, 0) == sizeof buffer) {
            uint signal = *(uint *)buffer;
            if (signal == SIGUSR1 && CALL(getppid, 0, 0, 0, 0, 0) != parent)
                kill = released = 1;
            else if (signal == SIGTERM || signal == SIGINT || signal == SIGHUP)
                kill = released = 1;
        }
        if (kill && alive) {
            if (!reaped) /* afterwards the number may belong to somebody else */
                CALL(kill, -child, SIGKILL, 0, 0, 0);
            kill_children(self);
        }
        /* As subreaper we inherit the sandbox's pid 1 when bubblewrap is gone, and its end is the end of them all. */
        while (alive) {
            long pid = CALL(wait4, -1, &how, 1 /* WNOHANG */, 0, 0);
            if (pid == child) {
                kill = reaped = 1; /* what bubblewrap leaves behind is not meant to stay */
                code = (how & 0x7f) ? 128 + (how & 0x7f) : how >> 8 & 0xff;
            }
            if (pid == -ECHILD) {
                alive = 0;
                report("ended", code);
            }
            if (pid <= 0)
                break;
        }
    }
    clean_up(words, count);
    return code;
}

/* ---- which face ------------------------------------------------------------------------------------------------------- */

__attribute__((used)) void entry(long *stack)
{
    int count = (int)stack[0];
    char **words = (char **)(stack + 1), **environment = words + count + 1;
    if (count >= 2 && same(words[1], "init"))
        leave(init(count - 2, words + 2, environment));
    if (count >= 2 && same(words[1], "agent"))
        leave(agent(count - 2, words + 2));
    if (count >= 3 && same(words[1], "--args")) {
        words = read_words((long)parse(words[2]), &count);
        leave(watch(words, count));
    }
    leave(watch(words + 1, count - 1));
}
