/* out[n, h] = sum_i softmax_i(scale * q[n, h] . k_i) v_i over the key rows begin[n]:end[n], then begin2[n]:end2[n].
 *
 * Per (query, head): score i is a chain of FMAs over d; the softmax sum runs over 16 lanes (lane = key's rank in
 * the sequence mod 16) and a fixed tree; the output is a chain of FMAs over keys in order, divided at the end. So the
 * bits depend on the query and its key rows in order, never on where they lie or who is computed beside it.
 *
 * A task is a block of neighbouring queries of one KV head with all its query heads: they share each K block
 * (transposed once) and each V row. Keys that only some queries of the block see are done query by query.
 * Nothing of size N x T is materialised beyond one block's scores.
 */
#include "tile.h"

#define MAX_QUERIES 8
#define MAX_ROWS 24  /* query heads of one block, unless a group alone is larger */
#define MAX_GROUP 256
#define KEYS 256    /* keys per pass over V: they stay in L1/L2 while every column block uses them */

typedef struct {
    void *out;
    const void *q, *k[2], *v[2];
    const int64_t *begin[2], *end[2];
    int64_t n, hq, hkv, d, group, dpad;
    float scale;
    int dtype, ranges;
} Attention;

typedef struct {
    int64_t q0, queries, rows, stride; /* rows = queries * group; stride of a score row */
    int64_t lo[2], hi[2];              /* union of the block's ranges */
    float *qt, *kt, *scores, *acc;
} Block;

static int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t len(const Attention *a, int r, int64_t n) { return max64(0, a->end[r][n] - a->begin[r][n]); }

static const char *key_row(const Attention *a, const void *base, int64_t row, int64_t kv) {
    return (const char *)base + (row * a->hkv + kv) * a->d * (a->dtype == F32 ? 4 : 2);
}

typedef float v8 __attribute__((vector_size(32), may_alias));
typedef float v8u __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t i8 __attribute__((vector_size(32), may_alias));
typedef uint32_t u8 __attribute__((vector_size(32), may_alias));
typedef uint16_t h8 __attribute__((vector_size(16), aligned(2), may_alias));

INLINE v8 load8(const char *p, int64_t i, const int dtype) {
    if (dtype == F32) return *(const v8u *)((const float *)p + i);
    const uint16_t *h = (const uint16_t *)p + i;
#if defined(__AVX2__)
    return (v8)((u8)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)h)) << 16);
#else
    return (v8)(__builtin_convertvector(*(const h8 *)h, u8) << 16);
#endif
}

/* 8 key rows x 8 dims, transposed into kt[d][NR] at column j. */
INLINE void transpose8(const char *const row[8], int64_t d, float *kt, int64_t j, const int dtype) {
    const i8 lo = {0, 8, 1, 9, 4, 12, 5, 13}, hi = {2, 10, 3, 11, 6, 14, 7, 15};
    const i8 a = {0, 1, 8, 9, 4, 5, 12, 13}, b = {2, 3, 10, 11, 6, 7, 14, 15};
    const i8 low = {0, 1, 2, 3, 8, 9, 10, 11}, high = {4, 5, 6, 7, 12, 13, 14, 15};
    v8 r[8], t[8], s[8];
    for (int i = 0; i < 8; i++) r[i] = load8(row[i], d, dtype);
    for (int i = 0; i < 4; i++) {
        t[2 * i] = __builtin_shuffle(r[2 * i], r[2 * i + 1], lo);
        t[2 * i + 1] = __builtin_shuffle(r[2 * i], r[2 * i + 1], hi);
    }
    for (int i = 0; i < 2; i++) {
        s[4 * i] = __builtin_shuffle(t[4 * i], t[4 * i + 2], a);
        s[4 * i + 1] = __builtin_shuffle(t[4 * i], t[4 * i + 2], b);
        s[4 * i + 2] = __builtin_shuffle(t[4 * i + 1], t[4 * i + 3], a);
        s[4 * i + 3] = __builtin_shuffle(t[4 * i + 1], t[4 * i + 3], b);
    }
    for (int i = 0; i < 4; i++) {
        *(v8u *)(kt + (d + i) * NR + j) = __builtin_shuffle(s[i], s[i + 4], low);
        *(v8u *)(kt + (d + i + 4) * NR + j) = __builtin_shuffle(s[i], s[i + 4], high);
    }
}

/* NR keys from absolute row `row`, of which `count` exist, as [d][NR] fp32; absent keys are zero. */
INLINE void transpose_keys(const Attention *a, const void *base, int64_t row, int64_t count, int64_t kv, float *kt,
                           const int dtype) {
    static const float zero[1024];
    for (int64_t j = 0; j < NR; j += 8) {
        const char *p[8];
        for (int i = 0; i < 8; i++)
            p[i] = j + i < count ? key_row(a, base, row + j + i, kv) : (const char *)zero;
        int64_t d = 0;
        for (; d + 8 <= a->d; d += 8) transpose8(p, d, kt, j, dtype);
        for (; d < a->d; d++)
            for (int i = 0; i < 8; i++) kt[d * NR + j + i] = load_as(p[i], d, dtype);
    }
}

/* C[rows, NR] over one column block; rows above MR go in turns. kind, strides as in tile(). */
INLINE void rows_tile(const int kind, const int add, int64_t rows, int64_t K, const float *x, int64_t xrow,
                      int64_t xk, const char *w, int64_t wk, float *c, int64_t crow) {
    for (int64_t r = 0; r < rows; r += MR) {
        const float *xr = x + r * xrow;
        float *cr = c + r * crow;
        switch (min64(MR, rows - r)) {
#define CASE(M_)                                                                                                     \
    case M_: tile(M_, 1, kind, add, K, xr, xrow, xk, w, wk, 0, cr, crow); break;
            FOR_EACH_M(CASE)
#undef CASE
        }
    }
}

/* The same over two column blocks for at most FEW rows: enough independent chains to keep the FMA units busy. */
INLINE void rows_tile_few(const int kind, const int add, int64_t rows, int64_t K, const float *x, int64_t xrow,
                          int64_t xk, const char *w, int64_t wk, int64_t wpanel, float *c, int64_t crow) {
    switch (rows) {
#define CASE(M_)                                                                                                     \
    case M_: tile(M_, 2, kind, add, K, x, xrow, xk, w, wk, wpanel, c, crow); break;
        FOR_FEW_M(CASE)
#undef CASE
    }
}

#define FEW (MR / 2)

__attribute__((noinline)) static void score_tile(int64_t rows, int64_t blocks, int64_t d, const float *q,
                                                 const float *kt, float *c, int64_t crow) {
    const char *w = (const char *)kt;
    if (blocks == 2 && rows <= FEW) {
        rows_tile_few(W_F32, 0, rows, d, q, d, 1, w, 4 * NR, d * 4 * NR, c, crow);
        return;
    }
    for (int64_t b = 0; b < blocks; b++)
        rows_tile(W_F32, 0, rows, d, q, d, 1, w + b * d * 4 * NR, 4 * NR, c + b * NR, crow);
}

INLINE void value_tile(const int kind, int64_t rows, int64_t keys, const float *p, int64_t prow, const char *v,
                       int64_t vk, int64_t columns, float *c, int64_t crow) {
    int64_t d = 0, size = kind == W_F32 ? 4 : 2;
    for (; rows <= FEW && d + 2 * NR <= columns; d += 2 * NR)
        rows_tile_few(kind, 1, rows, keys, p, prow, 1, v + d * size, vk, NR * size, c + d, crow);
    for (; d < columns; d += NR) rows_tile(kind, 1, rows, keys, p, prow, 1, v + d * size, vk, c + d, crow);
}

__attribute__((noinline)) static void value_tile_f32(int64_t rows, int64_t keys, const float *p, int64_t prow,
                                                     const char *v, int64_t vk, int64_t columns, float *c,
                                                     int64_t crow) {
    value_tile(W_F32, rows, keys, p, prow, v, vk, columns, c, crow);
}

__attribute__((noinline)) static void value_tile_bf16(int64_t rows, int64_t keys, const float *p, int64_t prow,
                                                      const char *v, int64_t vk, int64_t columns, float *c,
                                                      int64_t crow) {
    value_tile(W_BF16, rows, keys, p, prow, v, vk, columns, c, crow);
}

static void load_queries(const Attention *a, const Block *b, int64_t kv) {
    for (int64_t r = 0; r < b->rows; r++) {
        int64_t at = ((b->q0 + r / a->group) * a->hq + kv * a->group + r % a->group) * a->d;
        for (int64_t d = 0; d < a->d; d++) b->qt[r * a->d + d] = load_as(a->q, at + d, a->dtype) * a->scale;
    }
}

/* Scores of every query head of the block against the union of each range, at scores[row][key - lo]. */
static void score(const Attention *a, const Block *b, int64_t kv) {
    int64_t at = 0;
    for (int r = 0; r < a->ranges; r++) {
        for (int64_t row = b->lo[r]; row < b->hi[r]; row += 2 * NR) {
            int64_t blocks = b->hi[r] - row > NR ? 2 : 1;
            for (int64_t i = 0; i < blocks; i++) {
                int64_t from = row + i * NR, count = b->hi[r] - from;
                float *kt = b->kt + i * a->d * NR;
                if (a->dtype == F32) transpose_keys(a, a->k[r], from, count, kv, kt, F32);
                else transpose_keys(a, a->k[r], from, count, kv, kt, BF16);
            }
            score_tile(b->rows, blocks, a->d, b->qt, b->kt, b->scores + at + row - b->lo[r], b->stride);
        }
        at += (b->hi[r] - b->lo[r] + NR - 1) / NR * NR;
    }
}

/* exp(s - max) in place over s[0:count], zeros up to a multiple of LANES; returns the sum. */
static float softmax_row(float *s, int64_t count) {
    int64_t padded = (count + LANES - 1) / LANES * LANES;
    for (int64_t i = count; i < padded; i++) s[i] = -INFINITY;
    vf top = vset1(-INFINITY), acc[LANES / VW];
    for (int64_t i = 0; i < padded; i += VW) top = vmax(vload(s + i), top);
    float m = top[0], lane[LANES] __attribute__((aligned(64)));
    for (int i = 1; i < VW; i++) m = top[i] > m ? top[i] : m;
    if (!(m > -INFINITY)) m = 0.0f; /* nothing but -inf: the exponentials are zero, not NaN */
    for (int v = 0; v < LANES / VW; v++) acc[v] = vset1(0.0f);
    for (int64_t i = 0; i < padded; i += LANES)
        for (int v = 0; v < LANES / VW; v++) {
            vf e = vexp(vload(s + i + v * VW) - m);
            vstore(s + i + v * VW, e);
            acc[v] = acc[v] + e;
        }
    for (int v = 0; v < LANES / VW; v++) vstore(lane + v * VW, acc[v]);
    return lane_sum(lane);
}

/* acc[rows] += p[rows, keys] V[keys], keys = rows row .. row+keys of range r; the chain goes on where it stood. */
static void add_values(const Attention *a, int r, int64_t kv, int64_t row, int64_t keys, const float *p,
                       int64_t stride, int64_t rows, float *acc) {
    int64_t size = a->dtype == F32 ? 4 : 2, vk = a->hkv * a->d * size, whole = a->d / NR * NR;
    for (int64_t k = 0; k < keys; k += KEYS) {
        int64_t now = min64(KEYS, keys - k);
        const char *v = key_row(a, a->v[r], row + k, kv);
        (a->dtype == F32 ? value_tile_f32 : value_tile_bf16)(rows, now, p + k, stride, v, vk, whole, acc, a->dpad);
        for (int64_t m = 0; m < rows; m++)
            for (int64_t d = whole; d < a->d; d++) {
                float s = acc[m * a->dpad + d];
                for (int64_t i = 0; i < now; i++)
                    s = __builtin_fmaf(p[m * stride + k + i], load_as(v + i * vk, d, a->dtype), s);
                acc[m * a->dpad + d] = s;
            }
    }
}

/* Range r of the block: keys all queries see together, the edges one query at a time, always in key order.
 * off[q]: where this range's probabilities of query q begin in its score row. */
static void block_values(const Attention *a, const Block *b, int r, int64_t kv, const int64_t *off) {
    int64_t lo = a->begin[r][b->q0], hi = a->end[r][b->q0], shift = off[0] - a->begin[r][b->q0], same = 1;
    for (int64_t i = 1; i < b->queries; i++) {
        lo = max64(lo, a->begin[r][b->q0 + i]);
        hi = min64(hi, a->end[r][b->q0 + i]);
        same &= off[i] - a->begin[r][b->q0 + i] == shift;
    }
    if (!same || hi < lo) lo = hi = INT64_MIN;
    for (int pass = 0; pass < 3; pass++) {
        if (pass == 1 && lo < hi)
            add_values(a, r, kv, lo, hi - lo, b->scores + lo + shift, b->stride, b->rows, b->acc);
        for (int64_t i = 0; i < b->queries && pass != 1; i++) {
            int64_t begin = a->begin[r][b->q0 + i], end = a->end[r][b->q0 + i];
            int64_t from = pass == 0 ? begin : max64(begin, hi), to = pass == 0 ? min64(end, lo) : end;
            if (lo == INT64_MIN && pass == 0) continue;
            if (to > from)
                add_values(a, r, kv, from, to - from, b->scores + i * a->group * b->stride + off[i] + from - begin,
                           b->stride, a->group, b->acc + i * a->group * a->dpad);
        }
    }
}

/* Where range r of query i starts in a score row before its ranges are joined. */
static int64_t raw_offset(const Attention *a, const Block *b, int r, int64_t i) {
    int64_t at = r == 0 ? 0 : (b->hi[0] - b->lo[0] + NR - 1) / NR * NR;
    return at + (len(a, r, b->q0 + i) ? a->begin[r][b->q0 + i] - b->lo[r] : 0);
}

static void run_block(const Attention *a, const Block *b, int64_t kv) {
    int64_t off[2][MAX_QUERIES];
    float sum[MAX_GROUP];
    load_queries(a, b, kv);
    score(a, b, kv);
    memset(b->acc, 0, b->rows * a->dpad * sizeof(float));
    for (int64_t i = 0; i < b->queries; i++) {
        int64_t n0 = len(a, 0, b->q0 + i), n1 = a->ranges > 1 ? len(a, 1, b->q0 + i) : 0;
        int64_t o0 = raw_offset(a, b, 0, i), o1 = a->ranges > 1 ? raw_offset(a, b, 1, i) : 0;
        off[0][i] = o0;
        off[1][i] = o0 + n0;
        for (int64_t g = 0; g < a->group; g++) {
            float *s = b->scores + (i * a->group + g) * b->stride;
            if (n1) memmove(s + o0 + n0, s + o1, n1 * sizeof(float));
            sum[i * a->group + g] = softmax_row(s + o0, n0 + n1);
        }
    }
    for (int r = 0; r < a->ranges; r++) block_values(a, b, r, kv, off[r]);
    for (int64_t r = 0; r < b->rows; r++) {
        int64_t at = ((b->q0 + r / a->group) * a->hq + kv * a->group + r % a->group) * a->d;
        float inv = sum[r] > 0.0f ? 1.0f / sum[r] : (sum[r] == 0.0f ? 0.0f : NAN);
        for (int64_t d = 0; d < a->d; d++) store_as(a->out, at + d, b->acc[r * a->dpad + d] * inv, a->dtype);
    }
}

/* The longest run of queries from q0 that is worth doing together, and the union of their ranges. */
static void form_block(const Attention *a, Block *b, int64_t q0, int64_t limit) {
    b->q0 = q0;
    b->queries = 0;
    int64_t shortest = INT64_MAX, lo[2], hi[2];
    while (b->queries < limit && q0 + b->queries < a->n) {
        int64_t n = q0 + b->queries, wide = 0, mine = 0;
        for (int r = 0; r < a->ranges; r++) {
            int64_t l = len(a, r, n), empty = b->queries == 0 || b->hi[r] == b->lo[r];
            lo[r] = !l ? (empty ? 0 : b->lo[r]) : empty ? a->begin[r][n] : min64(b->lo[r], a->begin[r][n]);
            hi[r] = !l ? (empty ? 0 : b->hi[r]) : empty ? a->end[r][n] : max64(b->hi[r], a->end[r][n]);
            wide += hi[r] - lo[r];
            mine += l;
        }
        shortest = min64(shortest, mine);
        if (b->queries && wide > shortest + shortest / 4 + 2 * NR) break;
        memcpy(b->lo, lo, sizeof lo);
        memcpy(b->hi, hi, sizeof hi);
        b->queries++;
    }
    b->rows = b->queries * a->group;
    b->stride = 2 * NR;
    for (int r = 0; r < a->ranges; r++) b->stride += (b->hi[r] - b->lo[r] + NR - 1) / NR * NR;
}

static int place_block(const Attention *a, Block *b) {
    size_t floats = (size_t)(b->rows * a->d + 2 * a->d * NR + b->rows * b->stride + b->rows * a->dpad + 64);
    float *s = dspark_scratch(1, floats * sizeof(float));
    if (!s) return 1;
    b->kt = s;
    b->acc = b->kt + 2 * a->d * NR;
    b->qt = b->acc + b->rows * a->dpad;
    b->scores = b->qt + b->rows * a->d;
    return 0;
}

static int outside(const int64_t *begin, const int64_t *end, int64_t n, int64_t t) {
    int bad = 0;
    for (int64_t i = 0; i < n; i++) bad |= begin[i] < 0 || end[i] > t;
    return bad;
}

/* q, out [n, hq, d]; k, v [t, hkv, d]; k2, v2 [t2, hkv, d] with begin2, end2, or NULL: one range.
 * Returns 0; 1 when scratch could not be allocated; 4 when a range leaves its arena. */
EXPORT int dspark_attention(void *out, const void *q, const void *k, const void *v, const int64_t *begin,
                            const int64_t *end, const void *k2, const void *v2, const int64_t *begin2,
                            const int64_t *end2, int64_t n, int64_t t, int64_t t2, int64_t hq, int64_t hkv,
                            int64_t d, float scale, int dtype, int threads) {
    Attention a = {out, q, {k, k2}, {v, v2}, {begin, begin2}, {end, end2}, n, hq, hkv, d, hq / hkv,
                   (d + NR - 1) / NR * NR, scale, dtype, k2 ? 2 : 1};
    if (outside(begin, end, n, t) || (k2 && outside(begin2, end2, n, t2))) return 4;
    int64_t limit = max64(1, min64(MAX_QUERIES, MAX_ROWS / a.group)), blocks = 0, work = 0;
    while (limit > 1 && (n + limit - 1) / limit * hkv < 2 * threads) limit = (limit + 1) / 2;
    int64_t *starts = dspark_scratch(2, (size_t)(n + 1) * sizeof(int64_t));
    if (!starts) return 1;
    for (int64_t at = 0; at < n;) {
        Block b;
        form_block(&a, &b, at, limit);
        starts[blocks++] = at;
        at += b.queries;
        work += b.rows * b.stride;
    }
    starts[blocks] = n;
    if (work * hkv * d < 131072) threads = 1;
    int failed = 0;
#pragma omp parallel for schedule(dynamic) collapse(2) num_threads(threads) reduction(| : failed) if (threads > 1)
    for (int64_t i = 0; i < blocks; i++)
        for (int64_t kv = 0; kv < hkv; kv++) {
            Block b;
            form_block(&a, &b, starts[i], starts[i + 1] - starts[i]);
            if (place_block(&a, &b)) failed |= 1;
            else run_block(&a, &b, kv);
        }
    return failed;
}
