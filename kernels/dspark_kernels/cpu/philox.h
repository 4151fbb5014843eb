/* Philox-4x32-10 (Salmon et al., SC11), VW counters at a time, and the Gumbel noise made of its words. */
#ifndef DSPARK_PHILOX_H
#define DSPARK_PHILOX_H

#include "vec.h"

INLINE void mul_wide(vu a, uint32_t m, vu *hi, vu *lo) {
#if defined(__AVX512F__)
    __m512i x = (__m512i)a, k = _mm512_set1_epi32((int)m);
    __m512i even = _mm512_mul_epu32(x, k), odd = _mm512_mul_epu32(_mm512_srli_epi64(x, 32), k);
    *lo = (vu)_mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32));
    *hi = (vu)_mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
#elif defined(__AVX2__)
    __m256i x = (__m256i)a, k = _mm256_set1_epi32((int)m);
    __m256i even = _mm256_mul_epu32(x, k), odd = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), k);
    *lo = (vu)_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
    *hi = (vu)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
#else
    for (int i = 0; i < VW; i++) {
        uint64_t p = (uint64_t)a[i] * m;
        (*hi)[i] = (uint32_t)(p >> 32);
        (*lo)[i] = (uint32_t)p;
    }
#endif
}

/* c[0..3]: counters in, words out. */
INLINE void philox(vu c[4], uint32_t k0, uint32_t k1) {
#pragma GCC unroll 10
    for (int round = 0; round < 10; round++) {
        vu h0, l0, h1, l1;
        mul_wide(c[0], 0xD2511F53u, &h0, &l0);
        mul_wide(c[2], 0xCD9E8D57u, &h1, &l1);
        c[0] = h1 ^ c[1] ^ k0;
        c[2] = h0 ^ c[3] ^ k1;
        c[1] = l1;
        c[3] = l0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
}

/* Within each 128-bit part: the low (0) or high (1) 32-bit words of a and b, alternating. */
INLINE vu interleave(vu a, vu b, const int high) {
#if VW == 16
    const vi lo = {0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29};
#else
    const vi lo = {0, 8, 1, 9, 4, 12, 5, 13};
#endif
    return high ? __builtin_shuffle(a, b, lo + 2) : __builtin_shuffle(a, b, lo);
}

/* Within each 128-bit part: the low (0) or high (1) pair of a, then that of b. */
INLINE vu pair_up(vu a, vu b, const int high) {
#if VW == 16
    const vi lo = {0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29};
#else
    const vi lo = {0, 1, 8, 9, 4, 5, 12, 13};
#endif
    return high ? __builtin_shuffle(a, b, lo + 2) : __builtin_shuffle(a, b, lo);
}

/* u = ((word >> 9) + 0.5) / 2^23, in (0, 1), exact. */
INLINE vf unit(vu word) { return (__builtin_convertvector((vi)(word >> 9), vf) + 0.5f) * 1.1920928955078125e-07f; }

INLINE vf gumbel(vu word) { return -vlog(-vlog(unit(word))); }

#define GUMBEL_MAX 16.64f /* -ln(-ln(1 - 2^-24)) = 16.6356 */

#endif
