/* Copies many runs between two pools in one call, past the cache.
 *
 * runs: n rows of (offset in source, offset in target, bytes); none overlap. A run of some size is written with
 * non-temporal stores: an ordinary store first reads the line that it replaces (a third of the traffic) and throws what
 * the neighbours on this machine compute with out of the cache. Its halves go side by side: two streams wait for memory,
 * and for the addresses of small pages, a fifth less than one after the other. Short runs and ragged ends go by memcpy.
 */
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#include <immintrin.h>
#define STEP 64
#define MOVE(to, from) _mm512_stream_si512((void *)(to), _mm512_loadu_si512((const void *)(from)))
#elif defined(__AVX__)
#include <immintrin.h>
#define STEP 32
#define MOVE(to, from) _mm256_stream_si256((__m256i *)(to), _mm256_loadu_si256((const __m256i *)(from)))
#elif defined(__SSE2__)
#include <immintrin.h>
#define STEP 16
#define MOVE(to, from) _mm_stream_si128((__m128i *)(to), _mm_loadu_si128((const __m128i *)(from)))
#endif

#define LINE 64
#define AHEAD (4 * LINE)
#define SHORTEST 2048

#ifdef STEP
static inline void move_line(char *to, const char *from)
{
    __builtin_prefetch(from + AHEAD, 0, 0);
    for (int64_t part = 0; part < LINE; part += STEP)
        MOVE(to + part, from + part);
}

static void past_the_cache(char *to, const char *from, int64_t bytes)
{
    const int64_t ragged = (LINE - (int64_t)((uintptr_t)to % LINE)) % LINE;
    memcpy(to, from, ragged);
    to += ragged, from += ragged, bytes -= ragged;
    const int64_t half = bytes / (2 * LINE) * LINE;
    for (int64_t at = 0; at < half; at += LINE) {
        move_line(to + at, from + at);
        move_line(to + half + at, from + half + at);
    }
    memcpy(to + 2 * half, from + 2 * half, bytes - 2 * half);
}
#endif

void copy_runs(char *target, const char *source, const int64_t *runs, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        const int64_t *run = runs + 3 * i;
        char *to = target + run[1];
        const char *from = source + run[0];
#ifdef STEP
        if (run[2] >= SHORTEST) {
            past_the_cache(to, from, run[2]);
            continue;
        }
#endif
        memcpy(to, from, run[2]);
    }
#ifdef STEP
    _mm_sfence();
#endif
}
