/* A host's clock of the day, set ahead or back while processes run: LD_PRELOAD, with CLOCK_OFFSET naming a file of one double, in seconds,
 * that is looked at each time. The monotonic clock stays as it is, as it does when somebody sets a machine's clock. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <math.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile double *offset;

static long kernel(long number, long a, long b, long c, long d, long e, long f) {
    register long r10 __asm__("r10") = d, r8 __asm__("r8") = e, r9 __asm__("r9") = f;
    long answer;
    __asm__ volatile("syscall" : "=a"(answer) : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9) : "rcx", "r11", "memory");
    if (answer < 0 && answer > -4096) errno = (int)-answer, answer = -1;
    return answer;
}

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("CLOCK_OFFSET");
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0) return;
    void *page = mmap(NULL, sizeof(double), PROT_READ, MAP_SHARED, fd, 0);
    if (page != MAP_FAILED) offset = page;
    close(fd);
}

static void shift(struct timespec *at, double by) {
    double whole = floor(by);
    at->tv_sec += (time_t)whole;
    at->tv_nsec += (long)((by - whole) * 1e9);
    if (at->tv_nsec >= 1000000000L) at->tv_nsec -= 1000000000L, at->tv_sec++;
}

int clock_gettime(clockid_t which, struct timespec *at) {
    int failed = (int)kernel(SYS_clock_gettime, which, (long)at, 0, 0, 0, 0);
    if (!failed && offset && (which == CLOCK_REALTIME || which == CLOCK_REALTIME_COARSE)) shift(at, *offset);
    return failed;
}

int gettimeofday(struct timeval *restrict at, void *restrict zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec, at->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}

/* Deadlines of this clock, which the kernel would take for its own. Those of the monotonic one are smaller. */
static struct timespec true_time(const struct timespec *deadline) {
    struct timespec at = *deadline;
    if (offset && at.tv_sec > 1000000000) shift(&at, -*offset);
    return at;
}

int pthread_cond_timedwait(pthread_cond_t *restrict cond, pthread_mutex_t *restrict mutex, const struct timespec *restrict deadline) {
    static int (*real)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    if (!real) real = (typeof(real))dlsym(RTLD_NEXT, "pthread_cond_timedwait");
    struct timespec at = true_time(deadline);
    return real(cond, mutex, &at);
}

int pthread_cond_clockwait(pthread_cond_t *restrict cond, pthread_mutex_t *restrict mutex, clockid_t which,
                           const struct timespec *restrict deadline) {
    static int (*real)(pthread_cond_t *, pthread_mutex_t *, clockid_t, const struct timespec *);
    if (!real) real = (typeof(real))dlsym(RTLD_NEXT, "pthread_cond_clockwait");
    struct timespec at = true_time(deadline);
    return real(cond, mutex, which, &at);
}

int sem_timedwait(sem_t *restrict sem, const struct timespec *restrict deadline) {
    static int (*real)(sem_t *, const struct timespec *);
    if (!real) real = (typeof(real))dlsym(RTLD_NEXT, "sem_timedwait");
    struct timespec at = true_time(deadline);
    return real(sem, &at);
}

/* Abseil, which is in gRPC and tensorstore, waits by futexes of its own. */
long syscall(long number, ...) {
    va_list given;
    long a[6];
    va_start(given, number);
    for (int i = 0; i < 6; i++) a[i] = va_arg(given, long);
    va_end(given);
    struct timespec at;
    if (number == SYS_futex && (a[1] & FUTEX_CLOCK_REALTIME) && a[3]) at = true_time((struct timespec *)a[3]), a[3] = (long)&at;
    return kernel(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
