/* out[n, o] = sum_k x[n, k] * weight[o, k] (+ bias[o]) in fp32: chains of KB fused multiply-adds in k order, and the
 * chains' results added in order. Shorter chains round less than one long one (which misses transformers' fp32 logits
 * by 2e-4 over 30 layers); the order is the same for every row all the same.
 *
 * The weight is packed once in panels [ceil(O/NR)][I][NR] (padding columns are zero), in its own dtype: at few rows
 * the time is the time to read it. Rows are packed in tiles [I][m], converted to fp32. A task is a group of panels
 * that stays in L2 times a run of row tiles; who computes a tile never changes its bits (tile.h).
 */
#include "tile.h"

#define SAMPLES 16 /* weights kept unpacked behind the panels, to notice a write that torch's version counter misses */
#define GROUP_BYTES (96 * 1024)
#define ROW_CHUNK (MR * 64)
#define KB 64 /* part of the result's definition: changing it changes bits */

/* Bytes of one packed panel. With W_DOT an odd input gets a zero to pair with. */
static int64_t panel_size(int64_t i, int dtype) { return dtype == F32 ? 4 * NR * i : 2 * NR * (DOT ? i + i % 2 : i); }

EXPORT int64_t dspark_packed_bytes(int64_t o, int64_t i, int dtype) {
    return (o + NR - 1) / NR * panel_size(i, dtype) + 4 * SAMPLES;
}

INLINE uint32_t sample(const void *weight, int64_t count, int s, int dtype) {
    int64_t at = (count - 1) * s / (SAMPLES - 1);
    return dtype == F32 ? ((const uint32_t *)weight)[at] : ((const uint16_t *)weight)[at];
}

/* Does the weight still look as it did when it was packed? An optimizer step changes all of it. */
static int stale(const void *packed, const void *weight, int64_t o, int64_t i, int dtype) {
    const uint32_t *kept = (const void *)((const char *)packed + dspark_packed_bytes(o, i, dtype) - 4 * SAMPLES);
    for (int s = 0; s < SAMPLES && o * i > 0; s++)
        if (kept[s] != sample(weight, o * i, s, dtype)) return 1;
    return 0;
}

static void pack_panel(char *dst, const char *src, int64_t o0, int64_t o, int64_t i, int dtype) {
    if (dtype == F32) {
        for (int64_t j = 0; j < NR; j++) {
            const float *row = (const float *)src + (o0 + j) * i;
            for (int64_t k = 0; k < i; k++) ((float *)dst)[k * NR + j] = o0 + j < o ? row[k] : 0.0f;
        }
        return;
    }
    uint16_t *to = (uint16_t *)dst;
    for (int64_t j = 0; j < NR; j++) {
        const uint16_t *row = (const uint16_t *)src + (o0 + j) * i;
        if (DOT) {
            for (int64_t k = 0; k < i + i % 2; k++)
                to[(k / 2 * NR + j) * 2 + 1 - k % 2] = k < i && o0 + j < o ? row[k] : 0;
            continue;
        }
        int64_t at = j < VW ? 2 * j : 2 * (j - VW) + 1;
        for (int64_t k = 0; k < i; k++) to[k * NR + at] = o0 + j < o ? row[k] : 0;
    }
}

EXPORT void dspark_pack_weight(void *dst, const void *src, int64_t o, int64_t i, int dtype, int threads) {
    int64_t panels = (o + NR - 1) / NR, bytes = panel_size(i, dtype);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t p = 0; p < panels; p++) pack_panel((char *)dst + p * bytes, src, p * NR, o, i, dtype);
    for (int s = 0; s < SAMPLES && o * i > 0; s++)
        ((uint32_t *)((char *)dst + panels * bytes))[s] = sample(src, o * i, s, dtype);
}

typedef struct {
    void *out;
    const void *x;
    const char *w;
    const void *bias;
    int64_t n, i, o, panels, panel_bytes;
    int dtype, out_dtype;
    float *packed; /* row tiles of the current chunk */
    int64_t row0;  /* first row of the chunk */
} Linear;

/* Rows [row, row+m) to [k][m] fp32; for W_DOT to [pair of k][m], the first of the two in the high half. */
static void pack_rows(const Linear *a, int64_t row, int64_t m, float *dst) {
    if (DOT && a->dtype == BF16) {
        for (int64_t r = 0; r < m; r++) {
            const uint16_t *x = (const uint16_t *)a->x + (row + r) * a->i;
            word *to = (word *)dst + r;
            int64_t k = 0;
            for (; k + 2 <= a->i; k += 2) to[k / 2 * m] = (uint32_t)x[k] << 16 | x[k + 1];
            if (k < a->i) to[k / 2 * m] = (uint32_t)x[k] << 16;
        }
        return;
    }
    if (m == 1 && a->dtype == F32) {
        memcpy(dst, (const float *)a->x + row * a->i, a->i * sizeof(float));
        return;
    }
    for (int64_t r = 0; r < m; r++)
        for (int64_t k = 0; k < a->i; k++) dst[k * m + r] = load_as(a->x, (row + r) * a->i + k, a->dtype);
}

/* Adds the bias, rounds to the output dtype, drops the padding columns. c is [m][p*NR]. */
static void finish(const Linear *a, int64_t row, int m, int64_t col, int cols, const float *c) {
    int64_t valid = a->o - col < cols ? a->o - col : cols;
    for (int r = 0; r < m; r++) {
        int64_t base = (row + r) * a->o + col, j = 0;
        const float *cr = c + r * cols;
        for (; j + VW <= valid; j += VW) {
            vf v = vload(cr + j);
            if (a->bias) v = v + vload_as(a->bias, col + j, a->dtype);
            vstore_as(a->out, base + j, v, a->out_dtype);
        }
        for (; j < valid; j++) {
            float v = cr[j];
            if (a->bias) v = v + load_as(a->bias, col + j, a->dtype);
            store_as(a->out, base + j, v, a->out_dtype);
        }
    }
}

/* One tile over all of k, in blocks of KB: c = the sum of the blocks' chains, in order. It starts at -0, to which adding
 * any number gives that number, so every block is the same code. */
INLINE void blocked(const int M, const int P, const Linear *a, const float *x, const char *w, float *c) {
    int64_t each = DOT && a->dtype == BF16 ? 2 : 1, count = (a->i + each - 1) / each, block = KB / each;
    int64_t wk = a->dtype == F32 ? 4 * NR : 2 * NR * each;
    for (int j = 0; j < M * P * NR; j += VW) vstore(c + j, vset1(a->i ? -0.0f : 0.0f));
    for (int64_t k = 0; k < count; k += block) {
        int64_t length = count - k < block ? count - k : block;
        if (a->dtype == F32)
            tile(M, P, W_F32, SUM, length, x + k * M, 1, M, w + k * wk, wk, a->panel_bytes, c, P * NR);
        else
            tile(M, P, DOT ? W_DOT : W_PAIRED, SUM, length, x + k * M, 1, M, w + k * wk, wk, a->panel_bytes, c, P * NR);
    }
}

#define RUN(M_)                                                                                                      \
    __attribute__((noinline)) static void run_##M_(const Linear *a, const float *x, int64_t row, int64_t p0,        \
                                                   int64_t p1) {                                                     \
        float c[M_ * PANELS(M_) * NR] __attribute__((aligned(64)));                                                 \
        int64_t p = p0;                                                                                              \
        for (; p + PANELS(M_) <= p1; p += PANELS(M_)) {                                                              \
            blocked(M_, PANELS(M_), a, x, a->w + p * a->panel_bytes, c);                                             \
            finish(a, row, M_, p *NR, PANELS(M_) * NR, c);                                                           \
        }                                                                                                            \
        for (; p < p1; p++) {                                                                                        \
            blocked(M_, 1, a, x, a->w + p * a->panel_bytes, c);                                                      \
            finish(a, row, M_, p *NR, NR, c);                                                                        \
        }                                                                                                            \
    }
FOR_EACH_M(RUN)

static void run_tile(const Linear *a, const float *x, int64_t row, int64_t m, int64_t p0, int64_t p1) {
    switch (m) {
#define CASE(M_)                                                                                                     \
    case M_: run_##M_(a, x, row, p0, p1); break;
        FOR_EACH_M(CASE)
    }
}

static int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }

/* Tiles of even height: a low one at the end reads as much of the weights as a full one. */
static int64_t tile_start(int64_t rows, int64_t tiles, int64_t t) { return rows * t / tiles; }

static void run_task(const Linear *a, int64_t rows, int64_t tiles, int64_t t0, int64_t t1, int64_t p0, int64_t p1) {
    for (int64_t t = t0; t < t1; t++) {
        int64_t r = tile_start(rows, tiles, t), m = tile_start(rows, tiles, t + 1) - r;
        run_tile(a, a->packed + r * a->i, a->row0 + r, m, p0, p1);
    }
}

static void pack_tile(const Linear *a, int64_t rows, int64_t tiles, int64_t t) {
    int64_t r = tile_start(rows, tiles, t);
    pack_rows(a, a->row0 + r, tile_start(rows, tiles, t + 1) - r, a->packed + r * a->i);
}

/* One chunk of rows: pack its tiles, then walk (panel group) x (run of tiles). Called inside or outside a team. */
static void run_chunk(const Linear *a, int64_t rows, int threads) {
    int64_t tiles = (rows + MR - 1) / MR;
    int64_t group = GROUP_BYTES / (a->panel_bytes ? a->panel_bytes : 1);
    if (tiles == 1 || group * threads > a->panels) group = (a->panels + threads - 1) / threads;
    if (tiles == 1 && group > 4) group = (group + 3) / 4 * 4;
    if (group < 1) group = 1;
    int64_t groups = (a->panels + group - 1) / group, split = 1;
    while (groups * split < 2 * threads && split * 2 <= tiles) split *= 2;
    int64_t run = (tiles + split - 1) / split;
    if (threads == 1) {
        for (int64_t t = 0; t < tiles; t++) pack_tile(a, rows, tiles, t);
        for (int64_t g = 0; g < groups; g++)
            run_task(a, rows, tiles, 0, tiles, g * group, min64(a->panels, (g + 1) * group));
        return;
    }
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int64_t t = 0; t < tiles; t++) pack_tile(a, rows, tiles, t);
#pragma omp for schedule(dynamic) nowait
        for (int64_t task = 0; task < groups * split; task++) {
            int64_t g = task / split, s = task % split;
            run_task(a, rows, tiles, s * run, min64(tiles, (s + 1) * run), g * group, min64(a->panels, (g + 1) * group));
        }
    }
}

/* Returns 0; 1 when scratch could not be allocated; 8 when `weight` is no longer what `packed` was made of. */
EXPORT int dspark_linear(void *out, const void *x, const void *weight, const void *packed, const void *bias, int64_t n,
                         int64_t i, int64_t o, int dtype, int out_dtype, int threads) {
    if (stale(packed, weight, o, i, dtype)) return 8;
    Linear a = {out, x, packed, bias, n, i, o, (o + NR - 1) / NR, panel_size(i, dtype), dtype, out_dtype, NULL, 0};
    a.packed = dspark_scratch(0, (size_t)(min64(n, ROW_CHUNK) * i + 16) * sizeof(float));
    if (!a.packed) return 1;
    if (n * i * o < 65536) threads = 1;
    for (a.row0 = 0; a.row0 < n; a.row0 += ROW_CHUNK) run_chunk(&a, min64(ROW_CHUNK, n - a.row0), threads);
    return 0;
}
