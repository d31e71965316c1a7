/* Which calls of libc's file functions does a run make below some directories, and what if one fails?

   Loaded by LD_PRELOAD. A call counts if its path, or the path of its file descriptor, begins with a
   watched prefix. The n-th call fails, is short, happens although it reports a failure, or a signal
   arrives before it. Every call that counts can be recorded with its data: `struct record` in
   shim.py has the same layout. The clock of HDF5 files stands still, so that equal runs write equal
   bytes. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum mode { NONE, FAIL, SHORT, SIGNAL, LATE };

struct record {
    char function[24];
    int64_t number, offset, length, result;
    int32_t error, flags, data, path, other; /* the last three: bytes that follow */
};

static struct {
    char prefixes[8][PATH_MAX];
    int watched;
    int armed;
    enum mode mode;
    int value; /* errno, or the signal */
    long first, last;
    int log, log_data;
} plan = {.log = -1};

static struct shared {
    long count, fired;
} *shared;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

__attribute__((constructor)) static void begin(void) {
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
}

/* -- what Python calls */

void shim_watch(const char *prefix) {
    snprintf(plan.prefixes[plan.watched++], PATH_MAX, "%s", prefix);
}

void shim_record(int file, int with_data) {
    plan.log = file;
    plan.log_data = with_data;
}

/* Calls number first to last (from 1) get `mode`; 0 counts only. */
void shim_arm(int mode, int value, long first, long last) {
    shared->count = shared->fired = 0;
    plan.mode = mode;
    plan.value = value;
    plan.first = first;
    plan.last = last;
    plan.armed = 1;
}

void shim_disarm(void) { plan.armed = 0; }
long shim_count(void) { return shared->count; }
long shim_fired(void) { return shared->fired; }

/* -- the path of a call */

static int watches(const char *path) {
    for (int i = 0; i < plan.watched; i++)
        if (!strncmp(path, plan.prefixes[i], strlen(plan.prefixes[i])))
            return 1;
    return 0;
}

static void path_of(int file, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = syscall(SYS_readlink, link, path, PATH_MAX - 1);
    path[length > 0 ? length : 0] = 0;
}

static void path_at(int folder, const char *name, char *path) {
    path[0] = 0;
    if (!name)
        return;
    if (name[0] != '/') {
        if (folder == AT_FDCWD) {
            if (syscall(SYS_getcwd, path, PATH_MAX) <= 0)
                path[0] = 0;
        } else
            path_of(folder, path);
        size_t length = strlen(path);
        if (name[0])
            snprintf(path + length, PATH_MAX - length, "/%s", name);
    } else
        snprintf(path, PATH_MAX, "%s", name);
}

/* -- one call */

struct call {
    int counts;
    long number;
    enum mode mode;
    char path[PATH_MAX], other[PATH_MAX];
};

/* Counts a call whose paths are set; a signal arrives before it. */
static void enter(struct call *call) {
    call->counts = watches(call->path) || (call->other[0] && watches(call->other));
    call->mode = NONE;
    if (!call->counts)
        return;
    call->number = __atomic_add_fetch(&shared->count, 1, __ATOMIC_SEQ_CST);
    if (plan.mode == NONE || call->number < plan.first || call->number > plan.last)
        return;
    __atomic_add_fetch(&shared->fired, 1, __ATOMIC_SEQ_CST);
    if (plan.mode == SIGNAL)
        kill(getpid(), plan.value);
    else
        call->mode = plan.mode;
}

static void leave(struct call *call, const char *function, int64_t result, int64_t offset,
                  int64_t length, int flags, const void *data) {
    if (!call->counts || plan.log < 0)
        return;
    int error = errno;
    int with_data = data && plan.log_data && result > 0;
    struct record record = {
        .number = call->number, .offset = offset, .length = length, .result = result,
        .error = result < 0 ? error : 0, .flags = flags, .data = with_data ? (int)result : 0,
        .path = (int)strlen(call->path), .other = (int)strlen(call->other)};
    snprintf(record.function, sizeof record.function, "%s", function);
    struct iovec parts[] = {{&record, sizeof record},
                            {call->path, record.path},
                            {call->other, record.other},
                            {(void *)data, record.data}};
    pthread_mutex_lock(&lock);
    syscall(SYS_writev, plan.log, parts, 4);
    pthread_mutex_unlock(&lock);
    errno = error;
}

static void *real(const char *name) {
    void *function = dlsym(RTLD_NEXT, name);
    return function ? function : dlsym(RTLD_DEFAULT, name);
}
#define REAL(type, name, ...)                                                                      \
    static type (*original)(__VA_ARGS__);                                                          \
    if (!original)                                                                                 \
        original = (type(*)(__VA_ARGS__))real(#name);

static __thread struct call call; /* paths are large; a call does not nest */

/* The body of a function: `failed` is what it gives on failure, `run` calls the original. */
#define BODY(name, failed, run, offset, length, flags, data)                                       \
    enter(&call);                                                                                  \
    if (call.mode == FAIL) {                                                                       \
        errno = plan.value;                                                                        \
        leave(&call, #name, -1, offset, length, flags, NULL);                                      \
        errno = plan.value;                                                                        \
        return failed;                                                                             \
    }                                                                                              \
    __typeof__(run) result = run;                                                                  \
    leave(&call, #name, (int64_t)result, offset, length, flags, data);                             \
    if (call.mode == LATE) {                                                                       \
        errno = plan.value;                                                                        \
        return failed;                                                                             \
    }                                                                                              \
    return result;

/* a function of a path */
#define AT(type, name, failed, folder, path_, signature, types, arguments, flags)                  \
    type name signature {                                                                          \
        REAL(type, name, types)                                                                    \
        if (!plan.armed)                                                                           \
            return original arguments;                                                             \
        path_at(folder, path_, call.path);                                                         \
        call.other[0] = 0;                                                                         \
        BODY(name, failed, original arguments, 0, 0, flags, NULL)                                  \
    }
/* a function of two paths */
#define TWO(name, folder, path_, folder2, path2, signature, types, arguments)                      \
    int name signature {                                                                           \
        REAL(int, name, types)                                                                     \
        if (!plan.armed)                                                                           \
            return original arguments;                                                             \
        path_at(folder, path_, call.path);                                                         \
        path_at(folder2, path2, call.other);                                                       \
        BODY(name, -1, original arguments, 0, 0, 0, NULL)                                          \
    }
/* a function of an open file */
#define OF(type, name, failed, file, signature, types, arguments, offset, length)                  \
    type name signature {                                                                          \
        REAL(type, name, types)                                                                    \
        if (!plan.armed)                                                                           \
            return original arguments;                                                             \
        path_of(file, call.path);                                                                  \
        call.other[0] = 0;                                                                         \
        BODY(name, failed, original arguments, offset, length, 0, NULL)                            \
    }
#define UNPACK(...) __VA_ARGS__

#define OPEN(name)                                                                                 \
    int name(const char *path, int flags, ...) {                                                   \
        REAL(int, name, const char *, int, ...)                                                    \
        va_list rest;                                                                              \
        va_start(rest, flags);                                                                     \
        mode_t access = flags & (O_CREAT | __O_TMPFILE) ? va_arg(rest, mode_t) : 0;                \
        va_end(rest);                                                                              \
        if (!plan.armed)                                                                           \
            return original(path, flags, access);                                                  \
        path_at(AT_FDCWD, path, call.path);                                                        \
        call.other[0] = 0;                                                                         \
        BODY(open, -1, original(path, flags, access), 0, 0, flags, NULL)                           \
    }
OPEN(open)
OPEN(open64)
#define OPENAT(name)                                                                               \
    int name(int folder, const char *path, int flags, ...) {                                       \
        REAL(int, name, int, const char *, int, ...)                                               \
        va_list rest;                                                                              \
        va_start(rest, flags);                                                                     \
        mode_t access = flags & (O_CREAT | __O_TMPFILE) ? va_arg(rest, mode_t) : 0;                \
        va_end(rest);                                                                              \
        if (!plan.armed)                                                                           \
            return original(folder, path, flags, access);                                          \
        path_at(folder, path, call.path);                                                          \
        call.other[0] = 0;                                                                         \
        BODY(open, -1, original(folder, path, flags, access), 0, 0, flags, NULL)                   \
    }
OPENAT(openat)
OPENAT(openat64)

/* reads and writes: a short one has half of the bytes */
static ssize_t half(size_t length) { return length > 1 ? length / 2 : length; }

#define MOVE(name, kind, signature, types, before, asked, run, offset, data)                       \
    ssize_t name signature {                                                                       \
        REAL(ssize_t, name, types)                                                                 \
        if (!plan.armed)                                                                           \
            return run;                                                                            \
        path_of(file, call.path);                                                                  \
        call.other[0] = 0;                                                                         \
        int64_t at = offset;                                                                       \
        enter(&call);                                                                              \
        if (call.mode == FAIL) {                                                                   \
            errno = plan.value;                                                                    \
            leave(&call, kind, -1, at, asked, 0, NULL);                                            \
            errno = plan.value;                                                                    \
            return -1;                                                                             \
        }                                                                                          \
        if (call.mode == SHORT) {                                                                  \
            before                                                                                 \
        }                                                                                          \
        ssize_t result = run;                                                                      \
        leave(&call, kind, result, at, asked, 0, data);                                            \
        return result;                                                                             \
    }
#define NOW syscall(SYS_lseek, file, 0, SEEK_CUR)
MOVE(read, "read", (int file, void *into, size_t length), UNPACK(int, void *, size_t),
     length = half(length);, length, original(file, into, length), NOW, NULL)
MOVE(write, "write", (int file, const void *from, size_t length),
     UNPACK(int, const void *, size_t), length = half(length);, length,
     original(file, from, length), NOW, from)
#define POSITIONED(name)                                                                           \
    MOVE(name, "pread", (int file, void *into, size_t length, off64_t offset),                     \
         UNPACK(int, void *, size_t, off64_t), length = half(length);, length,                     \
         original(file, into, length, offset), offset, NULL)
POSITIONED(pread)
POSITIONED(pread64)
#define POSITIONED_WRITE(name)                                                                     \
    MOVE(name, "pwrite", (int file, const void *from, size_t length, off64_t offset),              \
         UNPACK(int, const void *, size_t, off64_t), length = half(length);, length,               \
         original(file, from, length, offset), offset, from)
POSITIONED_WRITE(pwrite)
POSITIONED_WRITE(pwrite64)
/* vectors: the bytes of the last part are halved; recorded without data unless there is one part */
#define LESS                                                                                       \
    struct iovec fewer[64];                                                                        \
    if (count <= 64) {                                                                             \
        memcpy(fewer, parts, count * sizeof *parts);                                               \
        fewer[count - 1].iov_len = half(fewer[count - 1].iov_len);                                 \
        parts = fewer;                                                                             \
    }
#define VECTOR(name, kind, data)                                                                   \
    MOVE(name, kind, (int file, const struct iovec *parts, int count, off64_t offset),             \
         UNPACK(int, const struct iovec *, int, off64_t), LESS, count,                             \
         original(file, parts, count, offset), offset, data)
VECTOR(preadv, "preadv", NULL)
VECTOR(preadv64, "preadv", NULL)
VECTOR(pwritev, "pwritev", count == 1 ? parts->iov_base : NULL)
VECTOR(pwritev64, "pwritev", count == 1 ? parts->iov_base : NULL)
#define VECTOR2(name, kind, data)                                                                  \
    MOVE(name, kind, (int file, const struct iovec *parts, int count, off64_t offset, int flags),  \
         UNPACK(int, const struct iovec *, int, off64_t, int), LESS, count,                        \
         original(file, parts, count, offset, flags), offset, data)
VECTOR2(preadv2, "preadv", NULL)
VECTOR2(preadv64v2, "preadv", NULL)
VECTOR2(pwritev2, "pwritev", count == 1 ? parts->iov_base : NULL)
VECTOR2(pwritev64v2, "pwritev", count == 1 ? parts->iov_base : NULL)
#define SEND(name)                                                                                 \
    MOVE(name, "sendfile", (int file, int from, off64_t *offset, size_t length),                   \
         UNPACK(int, int, off64_t *, size_t), length = half(length);, length,                      \
         original(file, from, offset, length), 0, NULL)
SEND(sendfile)
SEND(sendfile64)

OF(int, fsync, -1, file, (int file), UNPACK(int), (file), 0, 0)
OF(int, fdatasync, -1, file, (int file), UNPACK(int), (file), 0, 0)
OF(int, fallocate, -1, file, (int file, int how, off_t offset, off_t length),
   UNPACK(int, int, off_t, off_t), (file, how, offset, length), offset, length)
OF(int, fallocate64, -1, file, (int file, int how, off64_t offset, off64_t length),
   UNPACK(int, int, off64_t, off64_t), (file, how, offset, length), offset, length)
OF(int, ftruncate, -1, file, (int file, off_t length), UNPACK(int, off_t), (file, length), 0,
   length)
OF(int, ftruncate64, -1, file, (int file, off64_t length), UNPACK(int, off64_t), (file, length), 0,
   length)
OF(off_t, lseek, -1, file, (int file, off_t offset, int whence), UNPACK(int, off_t, int),
   (file, offset, whence), offset, 0)
OF(off64_t, lseek64, -1, file, (int file, off64_t offset, int whence), UNPACK(int, off64_t, int),
   (file, offset, whence), offset, 0)
OF(int, flock, -1, file, (int file, int how), UNPACK(int, int), (file, how), 0, 0)
OF(int, fchmod, -1, file, (int file, mode_t access), UNPACK(int, mode_t), (file, access), 0, 0)
OF(int, fstat, -1, file, (int file, struct stat *into), UNPACK(int, struct stat *), (file, into), 0,
   0)
OF(int, fstat64, -1, file, (int file, struct stat64 *into), UNPACK(int, struct stat64 *),
   (file, into), 0, 0)
OF(int, __fxstat64, -1, file, (int version, int file, struct stat64 *into),
   UNPACK(int, int, struct stat64 *), (version, file, into), 0, 0)
OF(int, fstatvfs64, -1, file, (int file, struct statvfs64 *into), UNPACK(int, struct statvfs64 *),
   (file, into), 0, 0)
/* These give the error's number itself. */
OF(int, posix_fadvise, plan.value, file, (int file, off_t offset, off_t length, int advice),
   UNPACK(int, off_t, off_t, int), (file, offset, length, advice), offset, length)
OF(int, posix_fadvise64, plan.value, file, (int file, off64_t offset, off64_t length, int advice),
   UNPACK(int, off64_t, off64_t, int), (file, offset, length, advice), offset, length)
OF(void *, mmap, MAP_FAILED, file,
   (void *at, size_t length, int access, int flags, int file, off_t offset),
   UNPACK(void *, size_t, int, int, int, off_t), (at, length, access, flags, file, offset), offset,
   length)
OF(void *, mmap64, MAP_FAILED, file,
   (void *at, size_t length, int access, int flags, int file, off64_t offset),
   UNPACK(void *, size_t, int, int, int, off64_t), (at, length, access, flags, file, offset),
   offset, length)

/* A close that fails has closed the file (Linux). */
int close(int file) {
    REAL(int, close, int)
    if (!plan.armed)
        return original(file);
    path_of(file, call.path);
    call.other[0] = 0;
    enter(&call);
    enum mode mode = call.mode;
    int result = original(file);
    leave(&call, "close", result, 0, 0, 0, NULL);
    if (mode == FAIL) {
        errno = plan.value;
        return -1;
    }
    return result;
}

TWO(rename, AT_FDCWD, from, AT_FDCWD, to, (const char *from, const char *to),
    UNPACK(const char *, const char *), (from, to))
TWO(renameat, folder, from, folder2, to,
    (int folder, const char *from, int folder2, const char *to),
    UNPACK(int, const char *, int, const char *), (folder, from, folder2, to))
TWO(renameat2, folder, from, folder2, to,
    (int folder, const char *from, int folder2, const char *to, unsigned flags),
    UNPACK(int, const char *, int, const char *, unsigned), (folder, from, folder2, to, flags))
TWO(link, AT_FDCWD, from, AT_FDCWD, to, (const char *from, const char *to),
    UNPACK(const char *, const char *), (from, to))
TWO(linkat, folder, from, folder2, to,
    (int folder, const char *from, int folder2, const char *to, int flags),
    UNPACK(int, const char *, int, const char *, int), (folder, from, folder2, to, flags))

AT(int, mkdir, -1, AT_FDCWD, path, (const char *path, mode_t access), UNPACK(const char *, mode_t),
   (path, access), 0)
AT(int, mkdirat, -1, folder, path, (int folder, const char *path, mode_t access),
   UNPACK(int, const char *, mode_t), (folder, path, access), 0)
AT(int, rmdir, -1, AT_FDCWD, path, (const char *path), UNPACK(const char *), (path), 0)
AT(int, unlink, -1, AT_FDCWD, path, (const char *path), UNPACK(const char *), (path), 0)
AT(int, unlinkat, -1, folder, path, (int folder, const char *path, int flags),
   UNPACK(int, const char *, int), (folder, path, flags), flags)
AT(int, chmod, -1, AT_FDCWD, path, (const char *path, mode_t access), UNPACK(const char *, mode_t),
   (path, access), 0)
AT(int, truncate64, -1, AT_FDCWD, path, (const char *path, off64_t length),
   UNPACK(const char *, off64_t), (path, length), 0)
AT(DIR *, opendir, NULL, AT_FDCWD, path, (const char *path), UNPACK(const char *), (path), 0)
AT(int, stat, -1, AT_FDCWD, path, (const char *path, struct stat *into),
   UNPACK(const char *, struct stat *), (path, into), 0)
AT(int, stat64, -1, AT_FDCWD, path, (const char *path, struct stat64 *into),
   UNPACK(const char *, struct stat64 *), (path, into), 0)
AT(int, lstat, -1, AT_FDCWD, path, (const char *path, struct stat *into),
   UNPACK(const char *, struct stat *), (path, into), 0)
AT(int, lstat64, -1, AT_FDCWD, path, (const char *path, struct stat64 *into),
   UNPACK(const char *, struct stat64 *), (path, into), 0)
AT(int, fstatat, -1, folder, path, (int folder, const char *path, struct stat *into, int flags),
   UNPACK(int, const char *, struct stat *, int), (folder, path, into, flags), 0)
AT(int, fstatat64, -1, folder, path,
   (int folder, const char *path, struct stat64 *into, int flags),
   UNPACK(int, const char *, struct stat64 *, int), (folder, path, into, flags), 0)
AT(int, __xstat64, -1, AT_FDCWD, path, (int version, const char *path, struct stat64 *into),
   UNPACK(int, const char *, struct stat64 *), (version, path, into), 0)
AT(int, __lxstat64, -1, AT_FDCWD, path, (int version, const char *path, struct stat64 *into),
   UNPACK(int, const char *, struct stat64 *), (version, path, into), 0)
AT(int, statvfs, -1, AT_FDCWD, path, (const char *path, struct statvfs *into),
   UNPACK(const char *, struct statvfs *), (path, into), 0)
AT(int, statvfs64, -1, AT_FDCWD, path, (const char *path, struct statvfs64 *into),
   UNPACK(const char *, struct statvfs64 *), (path, into), 0)
AT(int, access, -1, AT_FDCWD, path, (const char *path, int mode), UNPACK(const char *, int),
   (path, mode), 0)

OF(DIR *, fdopendir, NULL, file, (int file), UNPACK(int), (file), 0, 0)
OF(struct dirent *, readdir, NULL, dirfd(folder), (DIR * folder), UNPACK(DIR *), (folder), 0, 0)
OF(struct dirent64 *, readdir64, NULL, dirfd(folder), (DIR * folder), UNPACK(DIR *), (folder), 0, 0)

time_t time(time_t *into) {
    REAL(time_t, time, time_t *)
    time_t now = plan.armed ? 1600000000 : original(into);
    if (into)
        *into = now;
    return now;
}

int gettimeofday(struct timeval *into, void *zone) {
    REAL(int, gettimeofday, struct timeval *, void *)
    int result = original(into, zone);
    if (plan.armed && into)
        *into = (struct timeval){1600000000, 0};
    return result;
}
