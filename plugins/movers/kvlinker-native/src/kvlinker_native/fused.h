/* Copies ranges past the cache, and makes their XXH3 in the same pass, where the processor has instructions for it. */

#ifndef KVLINKER_FUSED_H
#define KVLINKER_FUSED_H

#include <stddef.h>
#include <stdint.h>

enum {
    FUSED_ALIGNMENT = 16, /* of targets, such as every allocator gives; 64 is a little faster */
    FUSED_BYTES = 241,    /* from this length on XXH3 goes by stripes; shorter ranges have other formulas */
    FUSED_RANGES = 2,     /* in one call, at most; four, with what is written past the cache, are slower again */
};

/* Copies up to FUSED_RANGES ranges of `size` bytes, at least FUSED_BYTES, to aligned targets that overlap nothing.
 *
 * A piece of each range is copied in turn: a core that waits for one range's memory is at the next one's meanwhile,
 * and what it may fetch ahead ends with a page of memory.
 */
typedef void (*copy_function)(int count, char *const *targets, const char *const *sources, size_t size);

/* Does the same, and makes the XXH3 of 64 bits of each, with the default secret. */
typedef void (*sum_copy_function)(int count, char *const *targets, const char *const *sources, size_t size,
                                  uint64_t *sums);

struct fused {
    copy_function copy;
    sum_copy_function sum_copy;
};

/* Those with registers of so many bits, 512 or 256; NULL where this processor has none. */
const struct fused *kvlinker_fused_by(int bits);

/* The best ones for this processor; NULL where there are none. */
const struct fused *kvlinker_fused(void);

#endif
