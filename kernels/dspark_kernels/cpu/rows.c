/* Row-wise operations of a decoder layer. Each row is computed alone, so nothing beside it can change its bits.
 *
 * rms_norm:  y = x / sqrt(mean(x^2) + eps) * weight        sum over 16 lanes, fixed tree; fp32 throughout
 * rotary:    y1 = x1 cos - x2 sin, y2 = x2 cos + x1 sin    two roundings, as plain tensor code
 * silu_mul:  y = g / (1 + e^-g) * u                        [g | u] is one row of width 2 I
 */
#include "vec.h"

#define PARALLEL_FROM 65536 /* elements under which a second thread costs more than it brings */

INLINE float square_sum(const void *x, int64_t at, int64_t h, int dtype) {
    float lane[LANES] __attribute__((aligned(64)));
    vf acc[LANES / VW];
    for (int v = 0; v < LANES / VW; v++) acc[v] = vset1(0.0f);
    int64_t j = 0;
    for (; j + LANES <= h; j += LANES)
        for (int v = 0; v < LANES / VW; v++) {
            vf a = vload_as(x, at + j + v * VW, dtype);
            acc[v] = vfma(a, a, acc[v]);
        }
    for (int v = 0; v < LANES / VW; v++) vstore(lane + v * VW, acc[v]);
    for (int l = 0; j < h; j++, l++) {
        float a = load_as(x, at + j, dtype);
        lane[l] = __builtin_fmaf(a, a, lane[l]);
    }
    return lane_sum(lane);
}

INLINE void norm_row(void *out, int64_t to, const void *x, int64_t at, const void *w, int64_t h, float eps, int dtype) {
    float inv = 1.0f / sqrtf(square_sum(x, at, h, dtype) / (float)h + eps);
    int64_t j = 0;
    for (; j + VW <= h; j += VW)
        vstore_as(out, to + j, vload_as(x, at + j, dtype) * inv * vload_as(w, j, dtype), dtype);
    for (; j < h; j++) store_as(out, to + j, load_as(x, at + j, dtype) * inv * load_as(w, j, dtype), dtype);
}

INLINE void add_row(void *sum, const void *a, const void *b, int64_t at, int64_t h, int dtype) {
    int64_t j = 0;
    for (; j + VW <= h; j += VW)
        vstore_as(sum, at + j, vload_as(a, at + j, dtype) + vload_as(b, at + j, dtype), dtype);
    for (; j < h; j++) store_as(sum, at + j, load_as(a, at + j, dtype) + load_as(b, at + j, dtype), dtype);
}

#define BY_DTYPE(...)                                                                                               \
    if (dtype == F32) {                                                                                              \
        const int D_ = F32;                                                                                          \
        __VA_ARGS__;                                                                                                 \
    } else {                                                                                                         \
        const int D_ = BF16;                                                                                         \
        __VA_ARGS__;                                                                                                 \
    }
#define TEAM(elements) num_threads(threads) if (threads > 1 && (elements) >= PARALLEL_FROM)

/* out[n, heads, h] of x whose rows of heads lie `stride` elements apart. */
EXPORT void dspark_rms_norm(void *out, const void *x, const void *w, int64_t n, int64_t heads, int64_t h,
                            int64_t stride, float eps, int dtype, int threads) {
#pragma omp parallel for schedule(static) TEAM(n *heads *h)
    for (int64_t r = 0; r < n; r++)
        for (int64_t i = 0; i < heads; i++)
            BY_DTYPE(norm_row(out, (r * heads + i) * h, x, r * stride + i * h, w, h, eps, D_));
}

/* sum = x + residual, rounded to dtype; out = its norm. */
EXPORT void dspark_add_rms_norm(void *out, void *sum, const void *x, const void *residual, const void *w, int64_t n,
                                int64_t h, float eps, int dtype, int threads) {
#pragma omp parallel for schedule(static) TEAM(n *h)
    for (int64_t r = 0; r < n; r++) BY_DTYPE({
        add_row(sum, x, residual, r * h, h, D_);
        norm_row(out, r * h, sum, r * h, w, h, eps, D_);
    });
}

INLINE void rotate_head(void *out, int64_t to, const void *x, int64_t at, const float *c, const float *s, int64_t half,
                        int dtype) {
    int64_t j = 0;
    for (; j + VW <= half; j += VW) {
        vf a = vload_as(x, at + j, dtype), b = vload_as(x, at + half + j, dtype);
        vf cj = vload(c + j), sj = vload(s + j);
        vstore_as(out, to + j, a * cj - b * sj, dtype);
        vstore_as(out, to + half + j, b * cj + a * sj, dtype);
    }
    for (; j < half; j++) {
        float a = load_as(x, at + j, dtype), b = load_as(x, at + half + j, dtype);
        store_as(out, to + j, a * c[j] - b * s[j], dtype);
        store_as(out, to + half + j, b * c[j] + a * s[j], dtype);
    }
}

/* out[n, heads, 2*half] of x whose rows lie `stride` elements apart; cos and sin [n, half] fp32. */
EXPORT void dspark_rotary(void *out, const void *x, const float *cos, const float *sin, int64_t n, int64_t heads,
                          int64_t half, int64_t stride, int dtype, int threads) {
#pragma omp parallel for schedule(static) TEAM(n *heads * 2 * half)
    for (int64_t r = 0; r < n; r++)
        for (int64_t h = 0; h < heads; h++)
            BY_DTYPE(rotate_head(out, (r * heads + h) * 2 * half, x, r * stride + h * 2 * half, cos + r * half,
                                 sin + r * half, half, D_));
}

INLINE vf silu(vf g) { return g / (vexp(-g) + 1.0f); }

INLINE void silu_mul_row(void *out, const void *x, int64_t r, int64_t i, int dtype) {
    int64_t from = 2 * r * i, to = r * i, j = 0;
    for (; j + VW <= i; j += VW)
        vstore_as(out, to + j, silu(vload_as(x, from + j, dtype)) * vload_as(x, from + i + j, dtype), dtype);
    for (; j < i; j++)
        store_as(out, to + j, silu(vset1(load_as(x, from + j, dtype)))[0] * load_as(x, from + i + j, dtype), dtype);
}

EXPORT void dspark_silu_mul(void *out, const void *x, int64_t n, int64_t i, int dtype, int threads) {
#pragma omp parallel for schedule(static) TEAM(n *i * 2)
    for (int64_t r = 0; r < n; r++) BY_DTYPE(silu_mul_row(out, x, r, i, D_));
}
