/* What both faces of the program stand on: system calls without a libc, text, reports, descriptors. */
#ifndef HUTCH_FREESTANDING_H
#define HUTCH_FREESTANDING_H
#include <asm/unistd.h>
#include <linux/capability.h>
#include <linux/close_range.h>
#include <linux/errno.h>
#include <linux/fcntl.h>
#include <linux/mount.h>
#include <linux/openat2.h>
#include <linux/poll.h>
#include <linux/prctl.h>
#include <linux/sched.h>
#include <linux/signal.h>
#include <linux/stat.h>

typedef unsigned long ulong;
typedef unsigned int uint;

/* ---- system calls -------------------------------------------------------------------------------------------- */

#if defined(__x86_64__)
static long syscall6(long number, long a, long b, long c, long d, long e, long f)
{
    long result;
    register long r10 __asm__("r10") = d;
    register long r8 __asm__("r8") = e;
    register long r9 __asm__("r9") = f;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    return result;
}
__asm__(".globl _start\n_start:\n xor %ebp, %ebp\n mov %rsp, %rdi\n and $-16, %rsp\n call entry\n");
#elif defined(__aarch64__)
static long syscall6(long number, long a, long b, long c, long d, long e, long f)
{
    register long x8 __asm__("x8") = number;
    register long x0 __asm__("x0") = a;
    register long x1 __asm__("x1") = b;
    register long x2 __asm__("x2") = c;
    register long x3 __asm__("x3") = d;
    register long x4 __asm__("x4") = e;
    register long x5 __asm__("x5") = f;
    __asm__ volatile("svc 0"
                     : "+r"(x0)
                     : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5)
                     : "memory");
    return x0;
}
__asm__(".globl _start\n_start:\n mov x29, #0\n mov x0, sp\n bl entry\n");
#else
#error "hutch-warden knows x86_64 and aarch64"
#endif

#define CALL(name, a, b, c, d, e) \
    syscall6(__NR_##name, (long)(a), (long)(b), (long)(c), (long)(d), (long)(e), 0)

#define O_PATH_DIR (O_PATH | O_CLOEXEC | O_DIRECTORY)
#define MNT_DETACH 2
#define OVERLAY_FLAGS (MS_NOSUID | MS_NODEV)
#define EXIT_FAILED 125
#define SIGNAL_BYTES 8

struct ksigaction {
    ulong handler, flags, restorer, mask;
};
struct kstatfs {
    long type, bsize;
    ulong blocks, bfree, bavail, files, ffree, fsid;
    long namelen, frsize, flags, spare[4];
};
struct kdirent {
    ulong inode, offset;
    unsigned short size;
    unsigned char type;
    char name[];
};

/* The compiler may call these two on its own, also without a libc. */
void *memset(void *to, int value, ulong size)
{
    for (ulong i = 0; i < size; i++)
        ((volatile char *)to)[i] = (char)value;
    return to;
}

void *memcpy(void *to, const void *from, ulong size)
{
    for (ulong i = 0; i < size; i++)
        ((volatile char *)to)[i] = ((const char *)from)[i];
    return to;
}

/* ---- text ---------------------------------------------------------------------------------------------------- */

static ulong length(const char *text)
{
    ulong n = 0;
    while (text[n])
        n++;
    return n;
}

static int same(const char *a, const char *b)
{
    while (*a && *a == *b)
        a++, b++;
    return *a == *b;
}

static char *append(char *to, char *end, const char *text)
{
    while (*text && to < end)
        *to++ = *text++;
    *to = 0;
    return to;
}

static char *append_number(char *to, char *end, long value)
{
    char digits[24], *at = digits + 23;
    ulong rest = value < 0 ? -(ulong)value : (ulong)value;
    *at = 0;
    do
        *--at = '0' + rest % 10;
    while (rest /= 10);
    if (value < 0)
        *--at = '-';
    return append(to, end, at);
}

/* Stops at the first byte that is no digit and leaves *text there. */
static ulong number(const char **text)
{
    ulong value = 0;
    while (**text >= '0' && **text <= '9')
        value = value * 10 + (ulong)(*(*text)++ - '0');
    return value;
}

static ulong parse(const char *text)
{
    return number(&text);
}

static uint parse_octal(const char *text)
{
    uint value = 0;
    while (*text >= '0' && *text <= '7')
        value = value * 8 + (uint)(*text++ - '0');
    return value;
}

/* Whether a comma-separated list holds the word. */
static int has(const char *list, const char *word)
{
    ulong n = length(word);
    while (*list) {
        ulong i = 0;
        while (i < n && list[i] == word[i])
            i++;
        if (i == n && (list[i] == ',' || !list[i]))
            return 1;
        while (*list && *list != ',')
            list++;
        if (*list)
            list++;
    }
    return 0;
}

static long write_all(long fd, const char *data, ulong size)
{
    while (size) {
        long n = CALL(write, fd, data, size, 0, 0);
        if (n == -EINTR)
            continue;
        if (n <= 0)
            return n ? n : -EIO;
        data += n;
        size -= (ulong)n;
    }
    return 0;
}

/* ---- reports ------------------------------------------------------------------------------------------------- */

static long status_fd = -1;

static void report(const char *word, long value)
{
    char line[64], *end = line + sizeof line - 2, *at;
    if (status_fd < 0)
        return;
    at = append(line, end, word);
    at = append(at, end, " ");
    at = append_number(at, end, value);
    *at++ = '\n';
    write_all(status_fd, line, (ulong)(at - line));
}

static __attribute__((noreturn)) void leave(int code)
{
    for (;;)
        CALL(exit_group, code, 0, 0, 0, 0);
}

static __attribute__((noreturn)) void fail(const char *operation, long error, const char *detail)
{
    char line[1024], *end = line + sizeof line - 2, *at, *clean;
    at = append(line, end, status_fd < 0 ? "hutch-warden: error " : "error ");
    at = append(at, end, operation);
    at = append(at, end, " ");
    at = append_number(at, end, error < 0 ? -error : error);
    at = append(at, end, " ");
    clean = at;
    at = append(at, end, detail);
    for (; clean < at; clean++) /* a path may hold anything; a report is one line */
        if ((unsigned char)*clean < ' ')
            *clean = '?';
    *at++ = '\n';
    write_all(status_fd < 0 ? 2 : status_fd, line, (ulong)(at - line));
    leave(EXIT_FAILED);
}

static long check(const char *operation, long result, const char *detail)
{
    if (result < 0)
        fail(operation, result, detail);
    return result;
}

/* ---- descriptors and files ----------------------------------------------------------------------------------- */

/* The plan numbers its own descriptors below these. */
enum { STATUS_FD = 200, LIFELINE_FD, GATE_FD, IDMAP_FD, TETHER_FD, CONTROL_FD, FREE_FD };

static void place(long fd, long target)
{
    if (fd == target)
        return;
    check("descriptor", CALL(dup3, fd, target, O_CLOEXEC, 0, 0), "dup3");
    CALL(close, fd, 0, 0, 0, 0);
}

static long open_beneath(long directory, const char *path, ulong flags, ulong resolve)
{
    struct open_how how = {flags | O_CLOEXEC, 0, resolve | RESOLVE_NO_MAGICLINKS};
    long fd;
    do /* a rename elsewhere on the path makes the kernel ask for another try */
        fd = CALL(openat2, directory, path, &how, sizeof how, 0);
    while (fd == -EAGAIN);
    return fd;
}

static long write_file(const char *path, const char *text)
{
    long fd = CALL(openat, AT_FDCWD, path, O_WRONLY | O_CLOEXEC, 0, 0), result;
    if (fd < 0)
        return fd;
    result = CALL(write, fd, text, length(text), 0, 0);
    CALL(close, fd, 0, 0, 0, 0);
    return result;
}

static long sleep_ms(long ms)
{
    long time[2] = {ms / 1000, ms % 1000 * 1000000};
    return CALL(nanosleep, time, 0, 0, 0, 0);
}

static void reset_signals(void)
{
    struct ksigaction standard = {0, 0, 0, 0};
    ulong none = 0;
    for (long n = 1; n <= 64; n++)
        CALL(rt_sigaction, n, &standard, 0, SIGNAL_BYTES, 0);
    CALL(rt_sigprocmask, SIG_SETMASK, &none, 0, SIGNAL_BYTES, 0);
}

static char **read_words(long fd, int *count)
{
    struct statx info;
    char *text, **words;
    ulong size, got = 0;
    int n = 0;
    check("args", CALL(statx, fd, "", AT_EMPTY_PATH, STATX_BASIC_STATS, &info), "statx");
    size = info.stx_size;
    /* room for the text and, after it, for one pointer a word */
    text = (char *)check("args", syscall6(__NR_mmap, 0, (long)(size + 1 + (size + 2) * sizeof(char *)), 3, 0x22, -1, 0), "mmap");
    while (got < size) {
        long r = CALL(pread64, fd, text + got, size - got, got, 0);
        if (r <= 0)
            fail("args", r ? r : EIO, "read");
        got += (ulong)r;
    }
    CALL(close, fd, 0, 0, 0, 0);
    words = (char **)(text + (size + sizeof(char *)) / sizeof(char *) * sizeof(char *));
    for (ulong at = 0; at < size; at += length(text + at) + 1)
        words[n++] = text + at;
    *count = n;
    return words;
}

#endif
