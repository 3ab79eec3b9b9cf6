/* A FUSE passthrough (read-write) that makes each metadata operation cost a fixed time and counts them.
   cc -O2 -D_FILE_OFFSET_BITS=64 slowfs.c -o slowfs $(pkg-config --cflags --libs fuse3)
   slowfs SOURCE MOUNTPOINT name_seconds attribute_seconds state_file [fuse options]
   name_seconds, attribute_seconds: for which the kernel keeps names, also of what does not exist, and attributes.
   state_file: unsigned 64-bit numbers. Counters: lookup/getattr, of these absent, open, readlink, readdir, read, bytes
   read, other. Settings, which may be changed at any time: latency and latency of a read, microseconds; the session
   whose processes are not slow and have a counter of their own, which follows, for all but reads; 0: none.
   A look for the name `.slowfs-forget` in the root makes the kernel forget all names: not found; before Linux 6.16,
   which cannot, an input/output error.
   With SLOWFS_LOG=FILE in the environment, each operation is written to that file: its number among the counters, with
   an x before it if it is of the session that is not slow, and the path. */
#define FUSE_USE_VERSION 31
#define _GNU_SOURCE
#include <fuse.h>
#include <fuse_lowlevel.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

static int root;
static double name_seconds, attribute_seconds;
static uint64_t *count;
static FILE *names;
static const char *source;
enum { GETATTR, ABSENT, OPEN, READLINK, READDIR, READ, BYTES, OTHER, LATENCY, READ_LATENCY, EXEMPT, OF_EXEMPT, NUMBERS };

static void pay(int what, int setting, const char *p) {
    pid_t caller = fuse_get_context()->pid;
    uint64_t exempt = __atomic_load_n(&count[EXEMPT], __ATOMIC_RELAXED);
    if (exempt && caller && (uint64_t) getsid(caller) == exempt) {
        if (what != READ) {
            __atomic_add_fetch(&count[OF_EXEMPT], 1, __ATOMIC_RELAXED);
            if (names) fprintf(names, "x%d %s%s\n", what, source, p);
        }
        return;
    }
    long us = __atomic_load_n(&count[setting], __ATOMIC_RELAXED);
    __atomic_add_fetch(&count[what], 1, __ATOMIC_RELAXED);
    if (names) fprintf(names, "%d %s%s\n", what, source, p);
    if (us > 0) { struct timespec t = {us / 1000000, us % 1000000 * 1000}; nanosleep(&t, NULL); }
}
static const char *rel(const char *p) { return p[1] ? p + 1 : "."; }
#define R(call) return (call) < 0 ? -errno : 0

/* The kernel does not ask for a name again that an open file or a mapped library holds, whatever caches are dropped:
   so another epoch begins. FUSE's library 3.14 has no function for this. */
static int forget(void) {
    uint32_t notice[4] = {sizeof notice, 8 /* FUSE_NOTIFY_INC_EPOCH */, 0, 0};
    int fd = fuse_session_fd(fuse_get_session(fuse_get_context()->fuse));
    return write(fd, notice, sizeof notice) < 0 ? -EIO : -ENOENT;
}
static int s_getattr(const char *p, struct stat *st, struct fuse_file_info *fi) {
    if (!strcmp(p, "/.slowfs-forget")) return forget();
    pay(GETATTR, LATENCY, p);
    int r = fi ? fstat(fi->fh, st) : fstatat(root, rel(p), st, AT_SYMLINK_NOFOLLOW);
    if (r < 0) { if (errno == ENOENT) __atomic_add_fetch(&count[ABSENT], 1, __ATOMIC_RELAXED); return -errno; }
    return 0;
}
static int s_readlink(const char *p, char *b, size_t n) {
    pay(READLINK, LATENCY, p);
    ssize_t r = readlinkat(root, rel(p), b, n - 1);
    if (r < 0) return -errno;
    b[r] = 0;
    return 0;
}
static int s_open(const char *p, struct fuse_file_info *fi) {
    pay(OPEN, LATENCY, p);
    int fd = openat(root, rel(p), fi->flags & ~O_NOFOLLOW);
    if (fd < 0) return -errno;
    fi->fh = fd;
    return 0;
}
static int s_create(const char *p, mode_t m, struct fuse_file_info *fi) {
    pay(OTHER, LATENCY, p);
    int fd = openat(root, rel(p), fi->flags, m);
    if (fd < 0) return -errno;
    fi->fh = fd;
    return 0;
}
static int s_read(const char *p, char *b, size_t n, off_t o, struct fuse_file_info *fi) {
    pay(READ, READ_LATENCY, p);
    ssize_t r = pread(fi->fh, b, n, o);
    if (r > 0) __atomic_add_fetch(&count[BYTES], r, __ATOMIC_RELAXED);
    return r < 0 ? -errno : r;
}
static int s_write(const char *p, const char *b, size_t n, off_t o, struct fuse_file_info *fi) {
    ssize_t r = pwrite(fi->fh, b, n, o);
    return r < 0 ? -errno : r;
}
static int s_release(const char *p, struct fuse_file_info *fi) { close(fi->fh); return 0; }
static int s_readdir(const char *p, void *buf, fuse_fill_dir_t fill, off_t o, struct fuse_file_info *fi,
                     enum fuse_readdir_flags f) {
    pay(READDIR, LATENCY, p);
    int fd = openat(root, rel(p), O_RDONLY | O_DIRECTORY);
    DIR *d = fd < 0 ? NULL : fdopendir(fd);
    if (!d) return -errno;
    for (struct dirent *e; (e = readdir(d));) {
        struct stat st = {.st_ino = e->d_ino, .st_mode = e->d_type << 12};
        if (fill(buf, e->d_name, &st, 0, 0)) break;
    }
    closedir(d);
    return 0;
}
static int s_statfs(const char *p, struct statvfs *s) { R(fstatvfs(root, s)); }
static int s_mkdir(const char *p, mode_t m) { pay(OTHER, LATENCY, p); R(mkdirat(root, rel(p), m)); }
static int s_unlink(const char *p) { pay(OTHER, LATENCY, p); R(unlinkat(root, rel(p), 0)); }
static int s_rmdir(const char *p) { pay(OTHER, LATENCY, p); R(unlinkat(root, rel(p), AT_REMOVEDIR)); }
static int s_symlink(const char *t, const char *p) { pay(OTHER, LATENCY, t); R(symlinkat(t, root, rel(p))); }
static int s_rename(const char *a, const char *b, unsigned f) { pay(OTHER, LATENCY, a); R(renameat2(root, rel(a), root, rel(b), f)); }
static int s_link(const char *a, const char *b) { pay(OTHER, LATENCY, a); R(linkat(root, rel(a), root, rel(b), 0)); }
static int s_chmod(const char *p, mode_t m, struct fuse_file_info *fi) { pay(OTHER, LATENCY, p); R(fchmodat(root, rel(p), m, 0)); }
static int s_truncate(const char *p, off_t n, struct fuse_file_info *fi) {
    pay(OTHER, LATENCY, p);
    if (fi) R(ftruncate(fi->fh, n));
    int fd = openat(root, rel(p), O_WRONLY);
    if (fd < 0) return -errno;
    int r = ftruncate(fd, n), e = errno;
    close(fd);
    return r < 0 ? -e : 0;
}
static int s_utimens(const char *p, const struct timespec t[2], struct fuse_file_info *fi) {
    pay(OTHER, LATENCY, p); R(utimensat(root, rel(p), t, AT_SYMLINK_NOFOLLOW));
}
static int s_fsync(const char *p, int d, struct fuse_file_info *fi) { R(fsync(fi->fh)); }
static void *s_init(struct fuse_conn_info *c, struct fuse_config *cfg) {
    cfg->entry_timeout = cfg->negative_timeout = name_seconds;
    cfg->attr_timeout = attribute_seconds;
    cfg->auto_cache = 1;   /* pages stay while size and mtime are the same (close-to-open) */
    cfg->use_ino = 1;
    cfg->nullpath_ok = 0;
    return NULL;
}
static const struct fuse_operations ops = {
    .init = s_init, .getattr = s_getattr, .readlink = s_readlink, .open = s_open, .create = s_create, .read = s_read,
    .write = s_write, .release = s_release, .readdir = s_readdir, .statfs = s_statfs, .mkdir = s_mkdir,
    .unlink = s_unlink, .rmdir = s_rmdir, .symlink = s_symlink, .rename = s_rename, .link = s_link, .chmod = s_chmod,
    .truncate = s_truncate, .utimens = s_utimens, .fsync = s_fsync,
};
int main(int n, char **a) {
    if (n < 6) { fprintf(stderr, "slowfs SOURCE MOUNTPOINT name_seconds attribute_seconds state_file [fuse options]\n"); return 2; }
    source = a[1];
    root = open(source, O_PATH | O_DIRECTORY);
    name_seconds = atof(a[3]);
    attribute_seconds = atof(a[4]);
    int fd = open(a[5], O_RDWR | O_CREAT, 0600);
    if (root < 0 || fd < 0 || ftruncate(fd, NUMBERS * 8)) { perror("slowfs"); return 1; }
    count = mmap(NULL, NUMBERS * 8, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (getenv("SLOWFS_LOG")) names = fopen(getenv("SLOWFS_LOG"), "ae");
    if (names) setlinebuf(names);
    char *args[32] = {"slowfs", a[2]};
    int m = 2;
    for (int i = 6; i < n && m < 31; i++) args[m++] = a[i];
    return fuse_main(m, args, &ops, NULL);
}
