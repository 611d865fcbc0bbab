/* Copies many ranges of memory, and makes their checksums while the processor's cache still has them.
 *
 * Called through ctypes, which lets the interpreter's lock go for the length of a call. Threads live for one call:
 * a process that forks later has none of them. A call waits for what helpers took on, and not for helpers that the
 * system did not get round to: on a busy machine their turn may come long after all is done.
 */

#define _GNU_SOURCE
#include "fused.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

typedef uint64_t (*sum_function)(const void *, size_t);

enum {
    MOST_THREADS = 64,
    STREAMED_BYTES = 4096,        /* of a range, from which writing past the cache pays */
    CACHED_BYTES = 256 << 10,     /* of a call, up to which the reader probably finds everything in the cache */
    SHARE_BYTES = 128 << 10,      /* taken by a thread at a time; long ranges still go several together, */
    MANY_SHARES = 16,             /* where there are so many shares of them that all threads end at about once */
    HELPED_NS = 100000,           /* of work for each helper: less is done sooner than a thread is made and wakes */
};

struct job {
    int64_t count;
    const int64_t *targets; /* NULL: only sums are made */
    const int64_t *sources;
    const int64_t *sizes;
    uint64_t *sums; /* NULL: only copies are made */
    sum_function sum;
    const struct fused *fused; /* copies past the cache, and makes the same sums; NULL where nothing does */
    int is_streamed;
    int64_t step;
    atomic_llong next; /* the first range that nobody took */
    pthread_mutex_t lock;
    pthread_cond_t is_done;
    int64_t done; /* ranges, under the lock */
    int users;    /* threads that may still look at this, under the lock */
};

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static int64_t now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * INT64_C(1000000000) + time.tv_nsec;
}

static void copy_streamed(char *target, const char *source, size_t size)
{
#if defined(__SSE2__)
    size_t head = (size_t)(-(uintptr_t)target & 63);
    memcpy(target, source, head);
    target += head;
    source += head;
    size -= head;
    for (; size >= 64; size -= 64, target += 64, source += 64) {
        __m128i first = _mm_loadu_si128((const __m128i *)source);
        __m128i second = _mm_loadu_si128((const __m128i *)(source + 16));
        __m128i third = _mm_loadu_si128((const __m128i *)(source + 32));
        __m128i fourth = _mm_loadu_si128((const __m128i *)(source + 48));
        _mm_stream_si128((__m128i *)target, first);
        _mm_stream_si128((__m128i *)(target + 16), second);
        _mm_stream_si128((__m128i *)(target + 32), third);
        _mm_stream_si128((__m128i *)(target + 48), fourth);
    }
#endif
    memcpy(target, source, size);
}

static void do_range(const struct job *job, int64_t i)
{
    const char *source = (const char *)(intptr_t)job->sources[i];
    size_t size = (size_t)job->sizes[i];
    if (job->targets != NULL) {
        char *target = (char *)(intptr_t)job->targets[i];
        if (job->is_streamed && size >= STREAMED_BYTES)
            copy_streamed(target, source, size);
        else
            memcpy(target, source, size);
    }
    if (job->sums != NULL)
        job->sums[i] = job->sum(source, size);
}

/* Whether a range may be copied with others of its size. */
static int is_fused(const struct job *job, int64_t i)
{
    int64_t shortest = job->sums != NULL ? FUSED_BYTES : STREAMED_BYTES;
    return job->fused != NULL && job->sizes[i] >= shortest && job->targets[i] % FUSED_ALIGNMENT == 0;
}

/* Do some ranges of one size together if that goes, else one; return how many. */
static int64_t do_some(const struct job *job, int64_t first, int64_t end)
{
    char *targets[FUSED_RANGES];
    const char *sources[FUSED_RANGES];
    int count = 0;
    for (int64_t i = first; i < end && count < FUSED_RANGES; i++, count++) {
        if (job->sizes[i] != job->sizes[first] || !is_fused(job, i))
            break;
        targets[count] = (char *)(intptr_t)job->targets[i];
        sources[count] = (const char *)(intptr_t)job->sources[i];
    }
    if (count == 0) {
        do_range(job, first);
        return 1;
    }
    if (job->sums != NULL)
        job->fused->sum_copy(count, targets, sources, (size_t)job->sizes[first], job->sums + first);
    else
        job->fused->copy(count, targets, sources, (size_t)job->sizes[first]);
    return count;
}

/* Do one share, and return how many ranges it had; 0 where none is left.
 *
 * The columns are the caller's: they are there while a share is not done.
 */
static int64_t do_share(struct job *job)
{
    int64_t first = atomic_fetch_add(&job->next, job->step);
    if (first >= job->count)
        return 0;
    int64_t end = least(job->count, first + job->step);
    for (int64_t i = first; i < end;)
        i += do_some(job, i, end);
#if defined(__SSE2__)
    _mm_sfence(); /* what was written past the cache is there before the share is done */
#endif
    pthread_mutex_lock(&job->lock);
    job->done += end - first;
    if (job->done == job->count)
        pthread_cond_signal(&job->is_done);
    pthread_mutex_unlock(&job->lock);
    return end - first;
}

static void work(struct job *job)
{
    while (do_share(job) > 0)
        ;
}

/* Let go of a job; the last one frees it. */
static void leave(struct job *job)
{
    pthread_mutex_lock(&job->lock);
    int users = --job->users;
    pthread_mutex_unlock(&job->lock);
    if (users == 0) {
        pthread_cond_destroy(&job->is_done);
        pthread_mutex_destroy(&job->lock);
        free(job);
    }
}

/* Threads of this process that copy now, callers and helpers: two calls at once have no use for helpers of each. */
static atomic_int copying;

/* Count threads of callers that work beside their calls, or no longer do. */
void kvlinker_count_others(int change)
{
    atomic_fetch_add(&copying, change);
}

static void forget_threads(void)
{
    atomic_store(&copying, 0); /* a process that was forked has none of them */
}

__attribute__((constructor)) static void watch_forks(void)
{
    pthread_atfork(NULL, NULL, forget_threads);
}

static void *help(void *argument)
{
    struct job *job = argument;
    if (atomic_load(&job->next) < job->count) { /* else it comes too late, and keeps nobody from a core */
        atomic_fetch_add(&copying, 1);
        work(job);
        atomic_fetch_sub(&copying, 1);
    }
    leave(job);
    return NULL;
}

/* Keep helpers off the core that the caller has a use for.
 *
 * Left to itself, Linux often puts a new thread behind the one that made it, and moves it to an idle core after more
 * milliseconds than a copy takes. Where the caller may run on one core alone, so may they.
 */
static void place_elsewhere(pthread_attr_t *attributes)
{
#if defined(__GLIBC__)
    cpu_set_t cores;
    int own = sched_getcpu();
    if (own < 0 || own >= CPU_SETSIZE || sched_getaffinity(0, sizeof cores, &cores) != 0)
        return; /* more cores than a set of this size has, or a system that does not tell */
    if (!CPU_ISSET(own, &cores) || CPU_COUNT(&cores) < 2)
        return;
    CPU_CLR(own, &cores);
    pthread_attr_setaffinity_np(attributes, sizeof cores, &cores);
#else
    (void)attributes; /* no such attribute in other C libraries */
#endif
}

/* Start helpers that take no signal: handlers are Python's, in its own threads. */
static int start(int wanted, struct job *job)
{
    sigset_t all, before;
    pthread_attr_t attributes;
    pthread_t thread;
    int started = 0;
    if (pthread_attr_init(&attributes) != 0)
        return 0;
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    place_elsewhere(&attributes);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (; started < wanted; started++) {
        pthread_mutex_lock(&job->lock);
        job->users++;
        pthread_mutex_unlock(&job->lock);
        if (pthread_create(&thread, &attributes, help, job) != 0) {
            leave(job);
            break; /* the caller does it alone */
        }
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return started;
}

/* Do the first share, and start as many helpers as the rest is worth if it goes on like that; return how many.
 *
 * How long a copy takes is known to nobody before: memory of one machine is four times as fast as another's, and what
 * the cache has is faster still. Making a thread takes about as long everywhere.
 */
static int begin(struct job *job, int64_t bytes, int64_t most_threads)
{
    int64_t began = now(), done = do_share(job), copied = 0;
    double spent = (double)(now() - began);
    for (int64_t i = 0; i < done; i++)
        copied += job->sizes[i];
    double left = spent * (double)(bytes - copied) / (double)(copied + 1);
    int64_t shares = (job->count - done + job->step - 1) / job->step; /* the caller takes one of them */
    int64_t now_copying = atomic_load(&copying);
    if (now_copying < 1)
        now_copying = 1; /* whoever was counted before a fork is counted off behind it */
    int64_t useful = least(least((int64_t)(left / HELPED_NS), shares - 1), most_threads - now_copying);
    return useful > 0 ? start((int)useful, job) : 0;
}

/* Copy `count` ranges and make their sums; return how many threads there were to do so, or -1 without memory for it.
 *
 * The ranges of `targets` must not overlap each other or any source. Sums are of the sources' bytes. `is_xxh3` says
 * that `sum` is XXH3 of 64 bits, so that it may be made in the pass that copies.
 */
int kvlinker_move(int64_t count, const int64_t *targets, const int64_t *sources, const int64_t *sizes,
                  uint64_t *sums, sum_function sum, int is_xxh3, int most_threads)
{
    int64_t total = 0;
    if (count < 1)
        return 0;
    for (int64_t i = 0; i < count; i++)
        total += sizes[i];
    struct job *job = malloc(sizeof *job);
    if (job == NULL)
        return -1;
    job->count = count;
    job->targets = targets;
    job->sources = sources;
    job->sizes = sizes;
    job->sums = sums;
    job->sum = sum;
    job->is_streamed = total > CACHED_BYTES;
    job->fused = targets != NULL && job->is_streamed && (is_xxh3 || sums == NULL) ? kvlinker_fused() : NULL;
    job->step = 1 + SHARE_BYTES / (1 + total / count);
    if (job->step < FUSED_RANGES && count >= MANY_SHARES * FUSED_RANGES)
        job->step = FUSED_RANGES;
    job->done = 0;
    job->users = 1;
    atomic_init(&job->next, 0);
    pthread_mutex_init(&job->lock, NULL);
    pthread_cond_init(&job->is_done, NULL);
    atomic_fetch_add(&copying, 1);
    int started = begin(job, total, least(most_threads, MOST_THREADS));
    work(job);
    atomic_fetch_sub(&copying, 1);
    pthread_mutex_lock(&job->lock);
    while (job->done < count)
        pthread_cond_wait(&job->is_done, &job->lock);
    pthread_mutex_unlock(&job->lock);
    leave(job);
    return started + 1;
}
