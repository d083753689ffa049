/* Optimizer updates over a flat range in one pass: AdamW moves 26 bytes per parameter, torch kernels over a hundred.
 *
 * The operations are those of the torch forms, to the bit: no contraction (-ffp-contract=off), no fast-math, correctly
 * rounded division and root (IEEE instructions, never errno or a library). This file does not depend on torch or
 * Python: functions take pointers, a length and a few numbers.
 */
#include "../native/pieces.h"

#include <math.h>

#define NUMBERS 9 /* at most, with the clipping factor, which comes last */
#define PIECE 65536 /* elements; 1.7 MB of traffic; whole segments (see SEGMENT) */

/* The update rules. Each computes `next`, the new master, from the master `w`, the clipped gradient `g`, the state
 * s[i], r[i] and the numbers h: see adamw.py, lion.py, sgd.py. */
#define ADAMW                                                  \
    const float g = gradient * h[8];                           \
    const float first = (s[i] * h[0]) + (g * h[2]);            \
    const float second = (r[i] * h[1]) + ((g * g) * h[3]);     \
    const float d = (sqrtf(second) * h[7]) + h[4];             \
    const float next = (w * h[5]) - ((first * h[6]) / d);      \
    s[i] = first;                                              \
    r[i] = second;

#define LION                                                   \
    const float g = gradient * h[6];                           \
    const float x = (s[i] * h[0]) + (g * h[2]);                \
    const float sign = (float)(x > 0.0f) - (float)(x < 0.0f);  \
    const float next = (w * h[4]) - (sign * h[5]);             \
    s[i] = (s[i] * h[1]) + (g * h[3]);

#define SGD                                                    \
    const float g = gradient * h[2];                           \
    const float t = g + (w * h[0]);                            \
    const float next = w - (t * h[1]);

#define SGD_MOMENTUM                                           \
    const float g = gradient * h[5];                           \
    const float t = g + (w * h[0]);                            \
    const float b = (s[i] * h[2]) + t;                         \
    const float next = w - (((t * h[3]) + (b * h[4])) * h[1]); \
    s[i] = b;

typedef struct {
    void *weight;
    int16_t *lo;
    float *s, *r; /* state */
    const void *grad;
    float h[NUMBERS];
} range;

#define ENTRY(name)                                                                                                        \
    int name(void *weight, int16_t *lo, float *s, float *r, const void *grad, int64_t n, const float *h, int threads) {      \
        range it = {weight, lo, s, r, grad, {0}};                                                                          \
        memcpy(it.h, h, sizeof it.h);                                                                                      \
        return run(name##_at, &it, n, PIECE, threads);                                                                     \
    }

/* A split master: hi is the weight, lo the lower half (see split.py). A NaN keeps no payload. */
#define SPLIT(name, RULE, type, widen)                                                                                     \
    BEST static void name##_piece(uint16_t *restrict hi, int16_t *restrict lo, float *restrict s, float *restrict r,       \
                                  const type *restrict grad, int64_t n, const float *restrict h) {                         \
        (void)s, (void)r;                                                                                                  \
        for (int64_t i = 0; i < n; i++) {                                                                                  \
            const float gradient = widen(grad[i]);                                                                         \
            const float w = of_bits(((uint32_t)hi[i] << 16) + (uint32_t)(int32_t)lo[i]);                                   \
            RULE                                                                                                           \
            const uint32_t bits = next != next ? 0x7FC00000u : to_bits(next);                                              \
            const uint32_t high = (uint32_t)((int32_t)(bits + 0x8000u) >> 16);                                             \
            hi[i] = (uint16_t)high;                                                                                        \
            lo[i] = (int16_t)(bits - (high << 16));                                                                        \
        }                                                                                                                  \
    }                                                                                                                      \
    static void name##_at(const void *it, int64_t at, int64_t n) {                                                         \
        const range *a = it;                                                                                               \
        name##_piece((uint16_t *)a->weight + at, a->lo + at, a->s ? a->s + at : 0, a->r ? a->r + at : 0,                   \
                     (const type *)a->grad + at, n, a->h);                                                                 \
    }                                                                                                                      \
    ENTRY(name)

/* The weight is its own master. */
#define WHOLE(name, RULE, type, widen)                                                                                     \
    BEST static void name##_piece(float *restrict weight, float *restrict s, float *restrict r,                            \
                                  const type *restrict grad, int64_t n, const float *restrict h) {                         \
        (void)s, (void)r;                                                                                                  \
        for (int64_t i = 0; i < n; i++) {                                                                                  \
            const float gradient = widen(grad[i]);                                                                         \
            const float w = weight[i];                                                                                     \
            RULE                                                                                                           \
            weight[i] = next;                                                                                              \
        }                                                                                                                  \
    }                                                                                                                      \
    static void name##_at(const void *it, int64_t at, int64_t n) {                                                         \
        const range *a = it;                                                                                               \
        name##_piece((float *)a->weight + at, a->s ? a->s + at : 0, a->r ? a->r + at : 0,                                  \
                     (const type *)a->grad + at, n, a->h);                                                                 \
    }                                                                                                                      \
    ENTRY(name)

#define KERNELS(name, RULE)                                                                                                \
    SPLIT(name##_split_bf16, RULE, uint16_t, of_bf16)                                                                      \
    SPLIT(name##_split_fp32, RULE, float, of_fp32)                                                                         \
    WHOLE(name##_whole_bf16, RULE, uint16_t, of_bf16)                                                                      \
    WHOLE(name##_whole_fp32, RULE, float, of_fp32)

KERNELS(adamw, ADAMW)
KERNELS(lion, LION)
KERNELS(sgd, SGD)
KERNELS(sgd_momentum, SGD_MOMENTUM)

/* Sums of the squares of a gradient's segments, by halving (see norm.py). The rest of the last segment counts as zeros.
 * A piece consists of whole segments. */
#define SEGMENT 4096
#define HALVE(half)                                                                                                        \
    for (int i = 0; i < half; i++) x[i] += x[i + half];

#define SEGMENT_SUMS(name, type, widen)                                                                                    \
    BEST static void name##_piece(float *restrict sums, const type *restrict grad, int64_t n) {                            \
        float x[SEGMENT];                                                                                                  \
        for (; n > 0; n -= SEGMENT, grad += SEGMENT) {                                                                     \
            const int64_t filled = n < SEGMENT ? n : SEGMENT;                                                              \
            for (int64_t i = 0; i < filled; i++) x[i] = widen(grad[i]) * widen(grad[i]);                                   \
            for (int64_t i = filled; i < SEGMENT; i++) x[i] = 0.0f;                                                        \
            HALVE(2048) HALVE(1024) HALVE(512) HALVE(256) HALVE(128) HALVE(64)                                             \
            HALVE(32) HALVE(16) HALVE(8) HALVE(4) HALVE(2) HALVE(1)                                                        \
            *sums++ = x[0];                                                                                                \
        }                                                                                                                  \
    }                                                                                                                      \
    static void name##_at(const void *it, int64_t at, int64_t n) {                                                         \
        const range *a = it;                                                                                               \
        name##_piece((float *)a->weight + at / SEGMENT, (const type *)a->grad + at, n);                                    \
    }                                                                                                                      \
    ENTRY(name)

SEGMENT_SUMS(segment_sums_bf16, uint16_t, of_bf16)
SEGMENT_SUMS(segment_sums_fp32, float, of_fp32)
