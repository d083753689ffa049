// Goes through all 2^32 fp32 patterns and checks the split of optim/split.py: hi = bf16 with ties away from zero, lo = 16-bit remainder.
// Three claims: every value that is not NaN comes back to the bit; every NaN becomes (0x7FC0, 0) and comes back as NaN; and the in-place
// form (add, xor, take halves) gives the same halves as the formula. Injective and total on 2^32 - NaNs is what "bijection" means here.
// Too slow for the suite in Python; run once by hand:  gcc -O2 -Wall -Wextra tools/split_exhaustive.c -o /tmp/split_exhaustive && /tmp/split_exhaustive
#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>

static int is_nan(uint32_t bits) { return (bits & 0x7FFFFFFFu) > 0x7F800000u; }

int main(void) {
    uint64_t values = 0, nans = 0, lost = 0, nan_lost = 0, forms_differ = 0, hi_is_nan = 0, not_nearest_even = 0;
    int32_t lo_min = 0, lo_max = 0;
    uint32_t bits = 0;
    do {
        uint32_t in = is_nan(bits) ? 0x7FC00000u : bits;
        // The formula, in wrapping arithmetic.
        uint16_t hi = (uint16_t)((in + 0x8000u) >> 16);
        int16_t lo = (int16_t)(uint16_t)(in - ((uint32_t)hi << 16));
        uint32_t back = ((uint32_t)hi << 16) + (uint32_t)(int32_t)lo;
        // The in-place form and its inverse.
        uint32_t word = (in + 0x8000u) ^ 0x8000u;
        uint32_t word_back = (word ^ 0x8000u) - 0x8000u;
        forms_differ += (uint16_t)(word >> 16) != hi || (int16_t)(uint16_t)word != lo || word_back != back;
        // The remainder as a true difference fits in int16: nothing was lost by wrapping.
        int64_t difference = (int64_t)in - ((int64_t)((in + 0x8000u) >> 16) << 16);
        if (!is_nan(bits)) forms_differ += difference != lo;
        if (lo < lo_min) lo_min = lo;
        if (lo > lo_max) lo_max = lo;

        if (is_nan(bits)) {
            nans++;
            nan_lost += hi != 0x7FC0 || lo != 0 || !is_nan(back);
        } else {
            values++;
            lost += back != bits;
            hi_is_nan += (hi & 0x7FFF) > 0x7F80;
            not_nearest_even += (uint16_t)((bits + 0x7FFFu + ((bits >> 16) & 1)) >> 16) != hi;
        }
    } while (++bits);
    printf("values that are not NaN      %" PRIu64 "\n", values);
    printf("  not restored to the bit    %" PRIu64 "\n", lost);
    printf("  whose hi is NaN            %" PRIu64 "\n", hi_is_nan);
    printf("  whose hi is not nearest-even %" PRIu64 "\n", not_nearest_even);
    printf("NaN patterns                 %" PRIu64 "\n", nans);
    printf("  not (0x7FC0, 0) and NaN    %" PRIu64 "\n", nan_lost);
    printf("formula and in-place differ  %" PRIu64 "\n", forms_differ);
    printf("lo spans                     [%d, %d]\n", lo_min, lo_max);
    int ok = !lost && !nan_lost && !forms_differ && !hi_is_nan && values + nans == (UINT64_C(1) << 32);
    puts(ok ? "PASS" : "FAIL");
    return !ok;
}
