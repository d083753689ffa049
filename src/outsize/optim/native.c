/* AdamW over a flat range, one pass: 26 bytes a parameter move instead of a hundred and more.
 *
 * The sequence of operations is that of adamw.py, to the bit: no contraction (-ffp-contract=off), no fast-math, correctly rounded division and
 * root (IEEE instructions; never through errno or a library). Nothing here knows torch: pointers, a length, ten numbers.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

typedef struct {
    float b1, b2, o1, o2, eps, decay, step, c2, clip;
} numbers;

/* Which instructions the machine has is found out when it runs. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define BEST __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define BEST
#endif

#define PIECE 65536

static inline float of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint32_t to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

static inline float of_bf16(uint16_t half) { return of_bits((uint32_t)half << 16); }
static inline float of_fp32(float value) { return value; }

#define MOVE(gradient)                                   \
    const float g = (gradient) * h->clip;                \
    const float first = (m[i] * h->b1) + (g * h->o1);    \
    const float second = (v[i] * h->b2) + ((g * g) * h->o2); \
    const float d = (sqrtf(second) * h->c2) + h->eps;    \
    const float move = (first * h->step) / d;            \
    m[i] = first;                                        \
    v[i] = second;

/* A split master: hi is the weight, lo the rest of it (see split.py). A NaN keeps no payload. */
#define SPLIT(name, type, widen)                                                                                                      \
    BEST static void name##_piece(uint16_t *restrict hi, int16_t *restrict lo, float *restrict m, float *restrict v,                  \
                                  const type *restrict grad, int64_t n, const numbers *restrict h) {                                  \
        for (int64_t i = 0; i < n; i++) {                                                                                             \
            MOVE(widen(grad[i]))                                                                                                      \
            const float w = (of_bits(((uint32_t)hi[i] << 16) + (uint32_t)(int32_t)lo[i]) * h->decay) - move;                          \
            const uint32_t bits = w != w ? 0x7FC00000u : to_bits(w);                                                                  \
            const uint32_t high = (uint32_t)((int32_t)(bits + 0x8000u) >> 16);                                                        \
            hi[i] = (uint16_t)high;                                                                                                   \
            lo[i] = (int16_t)(bits - (high << 16));                                                                                   \
        }                                                                                                                             \
    }                                                                                                                                 \
    void name(uint16_t *hi, int16_t *lo, float *m, float *v, const type *grad, int64_t n, const numbers *h, int threads) {            \
        _Pragma("omp parallel for num_threads(threads) schedule(static)") for (int64_t at = 0; at < n; at += PIECE)                   \
            name##_piece(hi + at, lo + at, m + at, v + at, grad + at, n - at < PIECE ? n - at : PIECE, h);                            \
    }

/* The weight is its own master. */
#define WHOLE(name, type, widen)                                                                                                      \
    BEST static void name##_piece(float *restrict w, float *restrict m, float *restrict v, const type *restrict grad, int64_t n,      \
                                  const numbers *restrict h) {                                                                        \
        for (int64_t i = 0; i < n; i++) {                                                                                             \
            MOVE(widen(grad[i]))                                                                                                      \
            w[i] = (w[i] * h->decay) - move;                                                                                          \
        }                                                                                                                             \
    }                                                                                                                                 \
    void name(float *w, int16_t *unused, float *m, float *v, const type *grad, int64_t n, const numbers *h, int threads) {            \
        (void)unused;                                                                                                                 \
        _Pragma("omp parallel for num_threads(threads) schedule(static)") for (int64_t at = 0; at < n; at += PIECE)                   \
            name##_piece(w + at, m + at, v + at, grad + at, n - at < PIECE ? n - at : PIECE, h);                                      \
    }

SPLIT(split_bf16, uint16_t, of_bf16)
SPLIT(split_fp32, float, of_fp32)
WHOLE(whole_bf16, uint16_t, of_bf16)
WHOLE(whole_fp32, float, of_fp32)
