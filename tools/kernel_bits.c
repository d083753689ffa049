/* Prints a checksum of what every kernel of optim/native.c computes, to compare processors. NaNs count as one value: their
 * sign and payload depend on the processor.
 *
 *   x86-64: gcc $FLAGS tools/kernel_bits.c -o bits -lm && ./bits
 *   arm64:  aarch64-linux-gnu-gcc $FLAGS -static tools/kernel_bits.c -o bits -lm && qemu-aarch64-static ./bits
 *
 * FLAGS are those of src/outsize/native/build.py. `make test-arm64` compares both.
 */
#include "../src/outsize/optim/native.c"

#include <stdio.h>

#define N 300007

static uint64_t state = 88172645463325252u;

static uint64_t draw(void) {
    state ^= state << 13;
    state ^= state >> 7;
    return state ^= state << 17;
}

static int only_usual; /* one NaN makes the sum of its segment NaN */

/* Half of them of training's sizes, half any bits: denormal numbers, infinities and NaNs too. */
static float number(int positive) {
    const uint64_t bits = draw();
    const float any = of_bits((uint32_t)bits), usual = ((float)(bits >> 40) / 8388608.0f - 1.0f) * 0.1f;
    const float value = bits & (1u << 31) && !only_usual ? any : usual;
    return positive ? fabsf(value) : value;
}

static uint64_t hash;

static void mix(uint32_t bits) { hash = (hash ^ bits) * 1099511628211u; }

static void mix_float(float value) { mix(value != value ? 0x7FC00000u : to_bits(value)); }

static float s[N], r[N], whole[N], grad32[N], sums[N / SEGMENT + 1];
static uint16_t hi[N], grad16[N];
static int16_t lo[N];

static void fill(void) {
    for (int i = 0; i < N; i++) {
        s[i] = number(0), r[i] = number(1), whole[i] = number(0), grad32[i] = number(0);
        grad16[i] = (uint16_t)(to_bits(number(0)) >> 16), hi[i] = (uint16_t)(to_bits(number(0)) >> 16);
        lo[i] = (int16_t)draw();
    }
}

typedef int (*entry)(void *, int16_t *, float *, float *, const void *, int64_t, const float *, int);

static void check(const char *name, entry kernel, int is_split, int is_bf16, const float *h, int threads) {
    state = 88172645463325252u, hash = 1469598103934665603u;
    fill();
    if (kernel(is_split ? (void *)hi : (void *)whole, lo, s, r, is_bf16 ? (void *)grad16 : (void *)grad32, N, h, threads))
        abort();
    for (int i = 0; i < N; i++) {
        mix(hi[i]), mix((uint16_t)lo[i]);
        mix_float(whole[i]), mix_float(s[i]), mix_float(r[i]);
    }
    printf("%-24s %016llx\n", name, (unsigned long long)hash);
}

static void check_sums(const char *name, entry kernel, int is_bf16) {
    only_usual = 1, state = 88172645463325252u, hash = 1469598103934665603u;
    fill();
    if (kernel(sums, 0, 0, 0, is_bf16 ? (void *)grad16 : (void *)grad32, N, (float[NUMBERS]){0}, 2)) abort();
    for (int i = 0; i < N / SEGMENT + 1; i++) mix_float(sums[i]);
    printf("%-24s %016llx\n", name, (unsigned long long)hash);
}

#define RULES(name, ...)                                            \
    {                                                               \
        const float h[NUMBERS] = {__VA_ARGS__};                     \
        check(#name "_split_bf16", name##_split_bf16, 1, 1, h, 1);  \
        check(#name "_split_fp32", name##_split_fp32, 1, 0, h, 3);  \
        check(#name "_whole_bf16", name##_whole_bf16, 0, 1, h, 3);  \
        check(#name "_whole_fp32", name##_whole_fp32, 0, 0, h, 1);  \
    }

int main(void) {
    RULES(adamw, 0.9f, 0.999f, 0.1f, 0.001f, 1e-8f, 0.99999f, 1e-3f, 1.0050378f, 0.7f)
    RULES(lion, 0.9f, 0.99f, 0.1f, 0.01f, 0.9999f, 1e-4f, 0.7f)
    RULES(sgd, 0.1f, 1e-2f, 0.7f)
    RULES(sgd_momentum, 0.1f, 1e-2f, 0.9f, 1.0f, 0.9f, 0.7f)
    check_sums("segment_sums_bf16", segment_sums_bf16, 1);
    check_sums("segment_sums_fp32", segment_sums_fp32, 0);
    return 0;
}
