/* XXH3 of 64 bits for long inputs, as its specification (xxHash 0.8) defines it, with the copy in the same loop.
 *
 * Of some ranges at once: a block of each in turn, so that memory is asked for several at a time. What is stored comes from the registers that are summed: no byte is copied that the sum did not see. Summing by
 * itself what was just copied takes a third of the copy's time; here it is done while the next bytes are on their way.
 */

#include "fused.h"

#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>

enum {
    STRIPE_BYTES = 64,
    LANES = 8,
    SECRET_BYTES = 192,
    SECRET_STEP = 8, /* from stripe to stripe */
    BLOCK_STRIPES = (SECRET_BYTES - STRIPE_BYTES) / SECRET_STEP,
    BLOCK_BYTES = BLOCK_STRIPES * STRIPE_BYTES,
    LAST_SECRET = SECRET_BYTES - STRIPE_BYTES - 7,
    MERGE_SECRET = 11,
};

#define PRIME32_1 UINT64_C(0x9E3779B1)
#define PRIME32_2 UINT64_C(0x85EBCA77)
#define PRIME32_3 UINT64_C(0xC2B2AE3D)
#define PRIME64_1 UINT64_C(0x9E3779B185EBCA87)
#define PRIME64_2 UINT64_C(0xC2B2AE3D27D4EB4F)
#define PRIME64_3 UINT64_C(0x165667B19E3779F9)
#define PRIME64_4 UINT64_C(0x85EBCA77C2B2AE63)
#define PRIME64_5 UINT64_C(0x27D4EB2F165667C5)
#define AVALANCHE UINT64_C(0x165667919E3779F9)

/* The default secret of the specification. */
static const uint8_t secret[SECRET_BYTES] __attribute__((aligned(64))) = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static const uint64_t first_lanes[LANES] __attribute__((aligned(64))) = {
    PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1,
};

static uint64_t word_of(const uint8_t *bytes)
{
    uint64_t word;
    memcpy(&word, bytes, sizeof word);
    return word;
}

static uint64_t merged(const uint64_t *lanes, size_t size)
{
    uint64_t sum = size * PRIME64_1;
    for (int i = 0; i < LANES; i += 2) {
        const uint8_t *key = secret + MERGE_SECRET + i * 8;
        unsigned __int128 product =
            (unsigned __int128)(lanes[i] ^ word_of(key)) * (lanes[i + 1] ^ word_of(key + 8));
        sum += (uint64_t)product ^ (uint64_t)(product >> 64);
    }
    sum ^= sum >> 37;
    sum *= AVALANCHE;
    return sum ^ (sum >> 32);
}

/* Store a stripe past the cache, in pieces as wide as the target is aligned to. */
__attribute__((target("avx512f"))) static inline void stream_512(char *target, __m512i data)
{
    if (((uintptr_t)target & 63) == 0) {
        _mm512_stream_si512((__m512i *)target, data);
        return;
    }
    __m128i *pieces = (__m128i *)target;
    _mm_stream_si128(pieces, _mm512_extracti32x4_epi32(data, 0));
    _mm_stream_si128(pieces + 1, _mm512_extracti32x4_epi32(data, 1));
    _mm_stream_si128(pieces + 2, _mm512_extracti32x4_epi32(data, 2));
    _mm_stream_si128(pieces + 3, _mm512_extracti32x4_epi32(data, 3));
}

__attribute__((target("avx2"))) static inline void stream_256(char *target, __m256i data)
{
    if (((uintptr_t)target & 31) == 0) {
        _mm256_stream_si256((__m256i *)target, data);
        return;
    }
    __m128i *pieces = (__m128i *)target;
    _mm_stream_si128(pieces, _mm256_castsi256_si128(data));
    _mm_stream_si128(pieces + 1, _mm256_extracti128_si256(data, 1));
}

/* One stripe, a register at a time: `sum` gets the neighbour's data and the product of the keyed halves. */
#define ADD_512(sum, data, at)                                                                                \
    do {                                                                                                      \
        __m512i key_ = _mm512_xor_si512(data, _mm512_loadu_si512(secret + (at)));                             \
        sum = _mm512_add_epi64(sum, _mm512_shuffle_epi32(data, _MM_PERM_BADC));                               \
        sum = _mm512_add_epi64(sum, _mm512_mul_epu32(key_, _mm512_srli_epi64(key_, 32)));                     \
    } while (0)

#define SCRAMBLED_512(sum)                                                                                    \
    do {                                                                                                      \
        sum = _mm512_xor_si512(_mm512_xor_si512(sum, _mm512_srli_epi64(sum, 47)), end_key);                   \
        sum = _mm512_add_epi64(_mm512_mul_epu32(sum, prime),                                                  \
                               _mm512_slli_epi64(_mm512_mul_epu32(_mm512_srli_epi64(sum, 32), prime), 32));   \
    } while (0)

/* Copy some stripes, and return the sum with theirs added. */
__attribute__((target("avx512f"))) static inline __m512i stripes_512(char *target, const char *source,
                                                                    size_t stripes, __m512i sum)
{
    for (size_t i = 0; i < stripes; i++, source += STRIPE_BYTES, target += STRIPE_BYTES) {
        __m512i data = _mm512_loadu_si512(source);
        stream_512(target, data);
        ADD_512(sum, data, i * SECRET_STEP);
    }
    return sum;
}

__attribute__((target("avx512f"))) static uint64_t end_512(char *target, const char *source, size_t rest,
                                                           size_t size, __m512i sum)
{
    __m512i last = _mm512_loadu_si512(source + rest - STRIPE_BYTES);
    ADD_512(sum, last, LAST_SECRET);
    uint64_t lanes[LANES], end[LANES];
    _mm512_storeu_si512(lanes, sum);
    _mm512_storeu_si512(end, last);
    memcpy(target, (const char *)end + STRIPE_BYTES - rest, rest);
    return merged(lanes, size);
}

__attribute__((target("avx512f"))) static void sum_copy_512(int count, char *const *targets,
                                                            const char *const *sources, size_t size,
                                                            uint64_t *sums)
{
    const __m512i prime = _mm512_set1_epi64((long long)PRIME32_1);
    const __m512i end_key = _mm512_loadu_si512(secret + SECRET_BYTES - STRIPE_BYTES);
    __m512i sum[FUSED_RANGES];
    size_t stripes = (size - 1) / STRIPE_BYTES, at = 0;
    for (int k = 0; k < count; k++)
        sum[k] = _mm512_load_si512(first_lanes);
    for (size_t blocks = stripes / BLOCK_STRIPES; blocks > 0; blocks--, at += BLOCK_BYTES)
        for (int k = 0; k < count; k++) {
            sum[k] = stripes_512(targets[k] + at, sources[k] + at, BLOCK_STRIPES, sum[k]);
            SCRAMBLED_512(sum[k]);
        }
    size_t left = stripes % BLOCK_STRIPES, end = at + left * STRIPE_BYTES;
    for (int k = 0; k < count; k++) {
        sum[k] = stripes_512(targets[k] + at, sources[k] + at, left, sum[k]);
        sums[k] = end_512(targets[k] + end, sources[k] + end, size - end, size, sum[k]);
    }
}

__attribute__((target("avx512f"))) static void copy_512(int count, char *const *targets, const char *const *sources,
                                                        size_t size)
{
    size_t at = 0;
    for (; at + BLOCK_BYTES <= size; at += BLOCK_BYTES)
        for (int k = 0; k < count; k++)
            for (size_t i = at; i < at + BLOCK_BYTES; i += STRIPE_BYTES)
                stream_512(targets[k] + i, _mm512_loadu_si512(sources[k] + i));
    for (int k = 0; k < count; k++)
        memcpy(targets[k] + at, sources[k] + at, size - at);
}

#define ADD_256(sum, data, at)                                                                                \
    do {                                                                                                      \
        __m256i key_ = _mm256_xor_si256(data, _mm256_loadu_si256((const __m256i *)(secret + (at))));          \
        sum = _mm256_add_epi64(sum, _mm256_shuffle_epi32(data, _MM_SHUFFLE(1, 0, 3, 2)));                     \
        sum = _mm256_add_epi64(sum, _mm256_mul_epu32(key_, _mm256_srli_epi64(key_, 32)));                     \
    } while (0)

__attribute__((target("avx2"))) static __m256i scrambled_256(__m256i sum, const uint8_t *key)
{
    const __m256i prime = _mm256_set1_epi64x((long long)PRIME32_1);
    sum = _mm256_xor_si256(sum, _mm256_srli_epi64(sum, 47));
    sum = _mm256_xor_si256(sum, _mm256_loadu_si256((const __m256i *)key));
    __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(sum, 32), prime);
    return _mm256_add_epi64(_mm256_mul_epu32(sum, prime), _mm256_slli_epi64(high, 32));
}

/* The sums of a range: lanes 0 to 3, and 4 to 7. */
struct sum_256 {
    __m256i low, high;
};

__attribute__((target("avx2"))) static inline void stripes_256(char *target, const char *source, size_t stripes,
                                                               struct sum_256 *sum)
{
    for (size_t i = 0; i < stripes; i++, source += STRIPE_BYTES, target += STRIPE_BYTES) {
        __m256i first = _mm256_loadu_si256((const __m256i *)source);
        __m256i second = _mm256_loadu_si256((const __m256i *)(source + 32));
        stream_256(target, first);
        stream_256(target + 32, second);
        ADD_256(sum->low, first, i * SECRET_STEP);
        ADD_256(sum->high, second, i * SECRET_STEP + 32);
    }
}

__attribute__((target("avx2"))) static uint64_t end_256(char *target, const char *source, size_t rest, size_t size,
                                                        struct sum_256 sum)
{
    const char *end = source + rest - STRIPE_BYTES;
    __m256i last[2] = {_mm256_loadu_si256((const __m256i *)end), _mm256_loadu_si256((const __m256i *)(end + 32))};
    ADD_256(sum.low, last[0], LAST_SECRET);
    ADD_256(sum.high, last[1], LAST_SECRET + 32);
    uint64_t lanes[LANES];
    _mm256_storeu_si256((__m256i *)lanes, sum.low);
    _mm256_storeu_si256((__m256i *)(lanes + 4), sum.high);
    memcpy(target, (const char *)last + STRIPE_BYTES - rest, rest);
    return merged(lanes, size);
}

__attribute__((target("avx2"))) static void sum_copy_256(int count, char *const *targets,
                                                         const char *const *sources, size_t size, uint64_t *sums)
{
    const uint8_t *end_key = secret + SECRET_BYTES - STRIPE_BYTES;
    struct sum_256 sum[FUSED_RANGES];
    size_t stripes = (size - 1) / STRIPE_BYTES, at = 0;
    for (int k = 0; k < count; k++) {
        sum[k].low = _mm256_load_si256((const __m256i *)first_lanes);
        sum[k].high = _mm256_load_si256((const __m256i *)(first_lanes + 4));
    }
    for (size_t blocks = stripes / BLOCK_STRIPES; blocks > 0; blocks--, at += BLOCK_BYTES)
        for (int k = 0; k < count; k++) {
            stripes_256(targets[k] + at, sources[k] + at, BLOCK_STRIPES, &sum[k]);
            sum[k].low = scrambled_256(sum[k].low, end_key);
            sum[k].high = scrambled_256(sum[k].high, end_key + 32);
        }
    size_t left = stripes % BLOCK_STRIPES, end = at + left * STRIPE_BYTES;
    for (int k = 0; k < count; k++) {
        stripes_256(targets[k] + at, sources[k] + at, left, &sum[k]);
        sums[k] = end_256(targets[k] + end, sources[k] + end, size - end, size, sum[k]);
    }
}

__attribute__((target("avx2"))) static void copy_256(int count, char *const *targets, const char *const *sources,
                                                     size_t size)
{
    size_t at = 0;
    for (; at + BLOCK_BYTES <= size; at += BLOCK_BYTES)
        for (int k = 0; k < count; k++)
            for (size_t i = at; i < at + BLOCK_BYTES; i += 32)
                stream_256(targets[k] + i, _mm256_loadu_si256((const __m256i *)(sources[k] + i)));
    for (int k = 0; k < count; k++)
        memcpy(targets[k] + at, sources[k] + at, size - at);
}

const struct fused *kvlinker_fused_by(int bits)
{
    static const struct fused by_512 = {copy_512, sum_copy_512}, by_256 = {copy_256, sum_copy_256};
    if (bits == 512)
        return __builtin_cpu_supports("avx512f") ? &by_512 : NULL;
    return bits == 256 && __builtin_cpu_supports("avx2") ? &by_256 : NULL;
}

#else

const struct fused *kvlinker_fused_by(int bits)
{
    (void)bits;
    return NULL;
}

#endif

const struct fused *kvlinker_fused(void)
{
    const struct fused *widest = kvlinker_fused_by(512);
    return widest != NULL ? widest : kvlinker_fused_by(256);
}
