/* Quantizes to 4 bits in blocks of 64 weights, in one pass: the bytes of bitsandbytes' CPU form (see four_bit.py), which
 * is written in torch and takes a hundred times as long.
 *
 * A block's weights are multiplied by 1 / absmax. The code of a weight is that of the highest threshold below it; a
 * comparison that is false for NaN counts, as in torch.bucketize. Two codes make a byte, the first one in its upper
 * half.
 */
#include "../native/pieces.h"

#define BLOCK 64
#define PIECE 65536 /* weights; whole blocks */
#define SMALLEST 1e-38f /* divisor of a block of zeros */

/* 2^112 moves the exponent from fp16's bias to fp32's, also that of denormal numbers. */
static inline float of_fp16(uint16_t half) {
    const uint32_t bits = (uint32_t)(half & 0x7FFF) << 13;
    const uint32_t size = bits >= 0x0F800000u ? bits | 0x7F800000u : to_bits(of_bits(bits) * 0x1p112f);
    return of_bits(size | (uint32_t)(half & 0x8000) << 16);
}

typedef struct {
    const void *weight;
    uint8_t *packed;
    float *absmax;
    float threshold[15];
    int32_t first, step[15]; /* the lowest code, and what each threshold adds to it */
} range;

#define ABOVE(k) code += scaled <= threshold[k] ? 0 : step[k];
#define CODE                                                                                                               \
    int32_t code = first;                                                                                                  \
    ABOVE(0) ABOVE(1) ABOVE(2) ABOVE(3) ABOVE(4) ABOVE(5) ABOVE(6) ABOVE(7)                                                \
    ABOVE(8) ABOVE(9) ABOVE(10) ABOVE(11) ABOVE(12) ABOVE(13) ABOVE(14)

/* Bits of absolute values are ordered as the values are, with NaN above infinity: their maximum needs no order. */
#define QUANTIZE(name, type, widen)                                                                                        \
    BEST static void name##_blocks(const type *restrict weight, uint8_t *restrict packed, float *restrict absmax,          \
                                   int64_t blocks, const float *restrict thresholds, const int32_t *restrict steps,        \
                                   int32_t first) {                                                                        \
        float threshold[15];                                                                                               \
        int32_t step[15];                                                                                                  \
        memcpy(threshold, thresholds, sizeof threshold);                                                                   \
        memcpy(step, steps, sizeof step);                                                                                  \
        for (; blocks > 0; blocks--, weight += BLOCK, packed += BLOCK / 2) {                                               \
            float value[BLOCK];                                                                                            \
            uint8_t codes[BLOCK];                                                                                          \
            uint32_t most = 0;                                                                                             \
            for (int i = 0; i < BLOCK; i++) {                                                                              \
                value[i] = widen(weight[i]);                                                                               \
                const uint32_t size = to_bits(value[i]) & 0x7FFFFFFFu;                                                     \
                most = size > most ? size : most;                                                                          \
            }                                                                                                              \
            const float largest = of_bits(most), inverse = 1.0f / (largest < SMALLEST ? SMALLEST : largest);               \
            *absmax++ = largest;                                                                                           \
            for (int i = 0; i < BLOCK; i++) {                                                                              \
                const float scaled = value[i] * inverse;                                                                   \
                CODE                                                                                                       \
                codes[i] = (uint8_t)code;                                                                                  \
            }                                                                                                              \
            for (int i = 0; i < BLOCK / 2; i++) packed[i] = (uint8_t)(codes[2 * i] << 4 | codes[2 * i + 1]);               \
        }                                                                                                                  \
    }                                                                                                                      \
    /* The last block, if it is shorter: its absmax is at least SMALLEST, and weights are divided by it. */                \
    static void name##_rest(const type *weight, uint8_t *packed, float *absmax, int n, const range *a) {                   \
        const float *threshold = a->threshold;                                                                             \
        const int32_t *step = a->step, first = a->first;                                                                   \
        uint32_t most = 0;                                                                                                 \
        for (int i = 0; i < n; i++) {                                                                                      \
            const uint32_t size = to_bits(widen(weight[i])) & 0x7FFFFFFFu;                                                 \
            most = size > most ? size : most;                                                                              \
        }                                                                                                                  \
        *absmax = of_bits(most) < SMALLEST ? SMALLEST : of_bits(most);                                                     \
        memset(packed, 0, (size_t)(n + 1) / 2);                                                                            \
        for (int i = 0; i < n + n % 2; i++) {                                                                              \
            const float scaled = i < n ? widen(weight[i]) / *absmax : 0.0f;                                                \
            CODE                                                                                                           \
            packed[i / 2] |= (uint8_t)(i % 2 ? code : code << 4);                                                          \
        }                                                                                                                  \
    }                                                                                                                      \
    static void name##_at(const void *it, int64_t at, int64_t n) {                                                         \
        const range *a = it;                                                                                               \
        const type *weight = (const type *)a->weight + at;                                                                 \
        const int64_t blocks = n / BLOCK, done = blocks * BLOCK;                                                           \
        name##_blocks(weight, a->packed + at / 2, a->absmax + at / BLOCK, blocks, a->threshold, a->step, a->first);        \
        if (n > done)                                                                                                      \
            name##_rest(weight + done, a->packed + (at + done) / 2, a->absmax + (at + done) / BLOCK, (int)(n - done), a);  \
    }                                                                                                                      \
    /* `codes`: the 16 codes in the order of their values. Returns 0, or -1 if there is no memory for the call. */         \
    int name(const void *weight, uint8_t *packed, float *absmax, int64_t n, const float *threshold, const uint8_t *codes,  \
             int threads) {                                                                                                \
        range it = {weight, packed, absmax, {0}, codes[0], {0}};                                                           \
        memcpy(it.threshold, threshold, sizeof it.threshold);                                                              \
        for (int k = 0; k < 15; k++) it.step[k] = (int32_t)codes[k + 1] - codes[k];                                        \
        return run(name##_at, &it, n, PIECE, threads);                                                                     \
    }

QUANTIZE(quantize_bf16, uint16_t, of_bf16)
QUANTIZE(quantize_fp16, uint16_t, of_fp16)
QUANTIZE(quantize_fp32, float, of_fp32)
