/* Copies many ranges of memory, and makes their checksums while the processor's cache still has them.
 *
 * Called through ctypes, which lets the interpreter's lock go for the length of a call. Threads live for one call:
 * a process that forks later has none of them, and nothing is kept between calls.
 */

#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

typedef uint64_t (*sum_function)(const void *, size_t);

enum {
    MOST_THREADS = 64,
    STREAMED_BYTES = 4096,        /* of a range, from which writing past the cache pays */
    CACHED_BYTES = 2 << 20,       /* of a call, up to which the reader probably finds everything in the cache */
    SHARE_BYTES = 256 << 10,      /* taken by a thread at a time */
    BYTES_PER_THREAD = 512 << 10, /* less than this is done sooner than a thread is made */
};

struct job {
    int64_t count;
    const int64_t *targets; /* NULL: only sums are made */
    const int64_t *sources;
    const int64_t *sizes;
    uint64_t *sums; /* NULL: only copies are made */
    sum_function sum;
    int is_streamed;
    int64_t step;
    _Atomic int64_t next;
};

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

static void *work(void *given)
{
    struct job *job = given;
    for (;;) {
        int64_t first = atomic_fetch_add(&job->next, job->step);
        int64_t end = job->count - first < job->step ? job->count : first + job->step;
        if (first >= job->count)
            break;
        for (int64_t i = first; i < end; i++)
            do_range(job, i);
    }
#if defined(__SSE2__)
    _mm_sfence(); /* what was written past the cache is there before the call returns */
#endif
    return NULL;
}

/* Start helpers that take no signal: handlers are Python's, in its own threads. */
static int start(pthread_t *threads, int wanted, struct job *job)
{
    sigset_t all, before;
    int started = 0;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (started < wanted && pthread_create(&threads[started], NULL, work, job) == 0)
        started++;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return started;
}

/* Copy `count` ranges and make their sums; return how many threads worked.
 *
 * The ranges of `targets` must not overlap each other or any source. Sums are of the sources' bytes.
 */
int kvlinker_move(int64_t count, const int64_t *targets, const int64_t *sources, const int64_t *sizes,
                  uint64_t *sums, sum_function sum, int most_threads)
{
    int64_t total = 0;
    pthread_t threads[MOST_THREADS];
    for (int64_t i = 0; i < count; i++)
        total += sizes[i];
    if (count < 1)
        return 0;
    struct job job = {
        .count = count,
        .targets = targets,
        .sources = sources,
        .sizes = sizes,
        .sums = sums,
        .sum = sum,
        .is_streamed = total > CACHED_BYTES,
        .step = 1 + SHARE_BYTES / (1 + total / count),
    };
    int64_t useful = total / BYTES_PER_THREAD;
    if (useful > count)
        useful = count;
    if (useful > most_threads)
        useful = most_threads;
    if (useful > MOST_THREADS)
        useful = MOST_THREADS;
    int started = useful > 1 ? start(threads, (int)useful - 1, &job) : 0;
    work(&job);
    for (int i = 0; i < started; i++)
        pthread_join(threads[i], NULL);
    return started + 1;
}
