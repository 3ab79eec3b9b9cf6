/* A FUSE passthrough (read-write) that makes each metadata operation cost a fixed time and counts them.
   cc -O2 -D_FILE_OFFSET_BITS=64 slowfs.c -o slowfs $(pkg-config --cflags --libs fuse3)
   slowfs SOURCE MOUNTPOINT cache_seconds state_file [fuse options]
   state_file: unsigned 64-bit numbers. Counters: lookup/getattr, of these absent, open, readlink, readdir, read, bytes
   read, other. Settings, which may be changed at any time: latency and latency of a read, microseconds;
   the session whose processes are neither counted nor slow, 0: none.
   With SLOWFS_LOG=FILE in the environment, each operation is written to that file, with its path in SOURCE. */
#define FUSE_USE_VERSION 31
#define _GNU_SOURCE
#include <fuse.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

static int root;
static double cache;
static uint64_t *count;
static FILE *names;
enum { GETATTR, ABSENT, OPEN, READLINK, READDIR, READ, BYTES, OTHER, LATENCY, READ_LATENCY, EXEMPT, NUMBERS };

static void pay(int what, int setting, const char *p) {
    pid_t caller = fuse_get_context()->pid;
    uint64_t exempt = __atomic_load_n(&count[EXEMPT], __ATOMIC_RELAXED);
    if (exempt && caller && (uint64_t) getsid(caller) == exempt) return;
    long us = __atomic_load_n(&count[setting], __ATOMIC_RELAXED);
    __atomic_add_fetch(&count[what], 1, __ATOMIC_RELAXED);
    if (names) fprintf(names, "%d %s\n", what, p);
    if (us > 0) { struct timespec t = {us / 1000000, us % 1000000 * 1000}; nanosleep(&t, NULL); }
}
static const char *rel(const char *p) { return p[1] ? p + 1 : "."; }
#define R(call) return (call) < 0 ? -errno : 0

static int s_getattr(const char *p, struct stat *st, struct fuse_file_info *fi) {
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
    cfg->entry_timeout = cfg->attr_timeout = cfg->negative_timeout = cache;
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
    if (n < 5) { fprintf(stderr, "slowfs SOURCE MOUNTPOINT cache_seconds state_file [fuse options]\n"); return 2; }
    root = open(a[1], O_PATH | O_DIRECTORY);
    cache = atof(a[3]);
    int fd = open(a[4], O_RDWR | O_CREAT, 0600);
    if (root < 0 || fd < 0 || ftruncate(fd, NUMBERS * 8)) { perror("slowfs"); return 1; }
    count = mmap(NULL, NUMBERS * 8, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (getenv("SLOWFS_LOG")) names = fopen(getenv("SLOWFS_LOG"), "ae");
    if (names) setlinebuf(names);
    char *args[32] = {"slowfs", a[2]};
    int m = 2;
    for (int i = 5; i < n && m < 31; i++) args[m++] = a[i];
    return fuse_main(m, args, &ops, NULL);
}
