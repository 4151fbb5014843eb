/* Vector types, bf16 conversion and the two transcendental functions every kernel shares.
 *
 * VW floats per vector: 16 with AVX-512, else 8 (GCC splits it on narrower machines). No result depends on VW:
 * reductions are defined over LANES = 16 partial sums and one fixed tree, whatever the width. Compiled with
 * -ffp-contract=off, so a multiply and an add stay two roundings unless vfma() is written.
 */
#ifndef DSPARK_VEC_H
#define DSPARK_VEC_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define VW 16
#else
#define VW 8
#endif
#define LANES 16
#define NR (2 * VW) /* columns of a packed weight panel */

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(4 * VW), may_alias));
typedef float vfu __attribute__((vector_size(4 * VW), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(4 * VW), may_alias));
typedef uint32_t vu __attribute__((vector_size(4 * VW), may_alias));
typedef uint32_t vuu __attribute__((vector_size(4 * VW), aligned(2), may_alias));
typedef uint32_t word __attribute__((may_alias)); /* what a float may hold when it is two bf16 numbers */
typedef uint16_t vh __attribute__((vector_size(2 * VW), may_alias));
typedef uint16_t vhu __attribute__((vector_size(2 * VW), aligned(2), may_alias));

enum { F32 = 0, BF16 = 1 };

INLINE vf vset1(float s) {
#if VW == 16
    return (vf){s, s, s, s, s, s, s, s, s, s, s, s, s, s, s, s};
#else
    return (vf){s, s, s, s, s, s, s, s};
#endif
}

INLINE vi viota(void) {
#if VW == 16
    return (vi){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#else
    return (vi){0, 1, 2, 3, 4, 5, 6, 7};
#endif
}

INLINE vf vload(const float *p) { return *(const vfu *)p; }
INLINE void vstore(float *p, vf v) { *(vfu *)p = v; }

INLINE vf vfma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    vf r;
    for (int i = 0; i < VW; i++) r[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return r;
#endif
}

/* Each 32-bit lane of x and w holds two bf16 numbers: acc + (product of the high halves), and then that + (product of
 * the low ones), each sum rounded as fp32. The same bits as two vfma(), but that factors and sums below 2^-126 count as
 * zero. */
#if defined(__AVX512BF16__) && defined(__AVX512F__)
#define DOT 1
INLINE vf vdot(vf w, vf x, vf acc) { return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)w, (__m512bh)x); }
#else
#define DOT 0
INLINE vf vdot(vf w, vf x, vf acc) {
    vf high = vfma((vf)((vu)w & 0xffff0000u), (vf)((vu)x & 0xffff0000u), acc);
    return vfma((vf)((vu)w << 16), (vf)((vu)x << 16), high);
}
#endif

INLINE vf vsel(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }

/* b when either is NaN, as the x86 instructions do it. */
INLINE vf vmax(vf a, vf b) {
#if defined(__AVX512F__)
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return vsel(a > b, a, b);
#endif
}

INLINE vf vmin(vf a, vf b) {
#if defined(__AVX512F__)
    return (vf)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (vf)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return vsel(a < b, a, b);
#endif
}

/* Is any lane of a comparison true? */
INLINE int vany(vi mask) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX2__)
    return _mm256_movemask_ps((__m256)mask) != 0;
#else
    int any = 0;
    for (int i = 0; i < VW; i++) any |= mask[i];
    return any != 0;
#endif
}

INLINE float bf16_to_f32(uint16_t h) {
    uint32_t u = (uint32_t)h << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

INLINE uint16_t f32_to_bf16(float f) { /* round to nearest even, NaN stays NaN */
    uint32_t u;
    memcpy(&u, &f, 4);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((u >> 16) | 0x40);
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

/* Elements [i, i+VW) of a row of either dtype. */
INLINE vf vload_as(const void *p, int64_t i, int dtype) {
    if (dtype == F32) return vload((const float *)p + i);
    const uint16_t *h = (const uint16_t *)p + i;
#if defined(__AVX512F__)
    return (vf)((vu)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)h)) << 16);
#elif defined(__AVX2__)
    return (vf)((vu)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)h)) << 16);
#else
    return (vf)(__builtin_convertvector(*(const vhu *)h, vu) << 16);
#endif
}

/* Low halves of 32-bit lanes, in order. */
INLINE vh narrow(vu v) {
#if defined(__AVX512F__)
    return (vh)_mm512_cvtepi32_epi16((__m512i)v);
#elif defined(__AVX2__)
    __m256i both = _mm256_packus_epi32((__m256i)v, (__m256i)v);
    return (vh)_mm256_castsi256_si128(_mm256_permute4x64_epi64(both, 0x08));
#else
    return __builtin_convertvector(v, vh);
#endif
}

INLINE void vstore_as(void *p, int64_t i, vf v, int dtype) {
    if (dtype == F32) {
        vstore((float *)p + i, v);
        return;
    }
    vu u = (vu)v;
    vu even = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    if (__builtin_expect(vany(v != v), 0)) {
        vu nan = (vu)(v != v);
        even = (nan & ((u >> 16) | 0x40u)) | (~nan & even);
    }
    *(vhu *)((uint16_t *)p + i) = narrow(even);
}

INLINE float load_as(const void *p, int64_t i, int dtype) {
    return dtype == F32 ? ((const float *)p)[i] : bf16_to_f32(((const uint16_t *)p)[i]);
}

INLINE void store_as(void *p, int64_t i, float v, int dtype) {
    if (dtype == F32) ((float *)p)[i] = v;
    else ((uint16_t *)p)[i] = f32_to_bf16(v);
}

/* 16 partial sums, lane j holding the elements with index = j mod 16, then one fixed tree. */
INLINE float lane_sum(const float *lane) {
    float a[8];
    for (int i = 0; i < 8; i++) a[i] = lane[i] + lane[i + 8];
    return ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]));
}

/* e^x, about 1 ulp; exactly 1 at 0, 0 below -104 (and at -inf), inf from 88.73 up, NaN stays. The two factors of
 * 2^k let results be subnormal, and make the ends under- and overflow by themselves. */
INLINE vf vexp(vf x) {
    vf c = vmin(vset1(89.0f), vmax(vset1(-104.0f), x));
    const vf magic = vset1(12582912.0f);
    vf n = vfma(c, vset1(1.44269504088896341f), magic) - magic;
    vf r = vfma(n, vset1(-0.693359375f), c);
    r = vfma(n, vset1(2.12194440e-4f), r);
    vf y = vset1(1.9875691500e-4f);
    y = vfma(y, r, vset1(1.3981999507e-3f));
    y = vfma(y, r, vset1(8.3334519073e-3f));
    y = vfma(y, r, vset1(4.1665795894e-2f));
    y = vfma(y, r, vset1(1.6666665459e-1f));
    y = vfma(y, r, vset1(5.0000001201e-1f));
    y = vfma(y, r * r, r) + 1.0f;
    vi k = __builtin_convertvector(n, vi);
    vi half = k >> 1;
    return y * (vf)((half + 127) << 23) * (vf)((k - half + 127) << 23);
}

/* ln(x) of a positive normal x, about 1 ulp. Plain multiplies and adds only: dspark/noise.py repeats it bit for bit. */
INLINE vf vlog(vf x) {
    vi bits = (vi)x;
    vi e = (bits >> 23) - 126;
    vf m = (vf)((bits & 0x007fffff) | 0x3f000000);
    vi small = m < 0.707106781186547524f;
    e = e + small;
    m = vsel(small, m + m, m) - 1.0f;
    vf z = m * m;
    vf y = m * 7.0376836292e-2f - 1.1514610310e-1f;
    y = y * m + 1.1676998740e-1f;
    y = y * m - 1.2420140846e-1f;
    y = y * m + 1.4249322787e-1f;
    y = y * m - 1.6668057665e-1f;
    y = y * m + 2.0000714765e-1f;
    y = y * m - 2.4999993993e-1f;
    y = y * m + 3.3333331174e-1f;
    y = y * m * z;
    vf ef = __builtin_convertvector(e, vf);
    y = y - ef * 2.12194440e-4f;
    y = y - z * 0.5f;
    return (m + y) + ef * 0.693359375f;
}

/* ln(p) of a probability: 0 gives -inf, subnormals are scaled first. */
INLINE vf vlog_prob(vf p) {
    vi tiny = p < 1.17549435e-38f;
    vf y = vlog(vsel(tiny, p * 16777216.0f, p));
    y = vsel(tiny, y - 16.6355323334f, y);
    return vsel(p > 0.0f, y, vset1(-INFINITY));
}

INLINE float exp1(float x) { return vexp(vset1(x))[0]; }
INLINE float log1_prob(float x) { return vlog_prob(vset1(x))[0]; }

/* Scratch of the calling thread, kept and grown; never shrinks. slot: independent buffers. NULL when out of memory. */
void *dspark_scratch(int slot, size_t bytes);

#endif
