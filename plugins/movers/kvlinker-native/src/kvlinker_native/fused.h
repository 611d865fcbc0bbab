/* Copies a range past the cache and makes its XXH3 in the same pass, where the processor has instructions for it. */

#ifndef KVLINKER_FUSED_H
#define KVLINKER_FUSED_H

#include <stddef.h>
#include <stdint.h>

enum {
    FUSED_ALIGNMENT = 16, /* of the target, such as every allocator gives; 64 is a little faster */
    FUSED_BYTES = 241,    /* from this length on XXH3 goes by stripes; shorter ranges have other formulas */
};

/* Copies `size` bytes, at least FUSED_BYTES, and returns their XXH3 of 64 bits with the default secret. */
typedef uint64_t (*fused_function)(char *target, const char *source, size_t size);

/* The one with registers of so many bits, 512 or 256; NULL where this processor has none. */
fused_function kvlinker_fused_by(int bits);

/* The best one for this processor; NULL where there is none. */
fused_function kvlinker_fused(void);

#endif
