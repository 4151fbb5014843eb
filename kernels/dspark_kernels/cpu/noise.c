/* Keyed noise as tensors (tests compare it with dspark/noise.py), the uniform of a position, and Gumbel-argmax.
 *
 * index[n] = argmax over {v: p[n, v] > 0} of ln p[n, v] + G(seed[n], stream, position[n], id[v]); ties to the lower
 * column. Exact, yet most noise is never drawn: G <= 16.64, so a token with ln p + 16.64 below the best score so far
 * cannot win. Columns left over are drawn four words a call where they lie dense, VW picked ids at a time elsewhere.
 * Nor are most logarithms taken: -ln u >= 1 - u, so a token with 1 - u > p e^-best cannot win either.
 */
#include "philox.h"

typedef struct {
    const float *p;
    const int64_t *ids; /* NULL: column = token id */
    int64_t v;
    uint32_t k0, k1, stream, position;
    float best;
    float threshold; /* a token with less probability cannot win */
    float reach;     /* nor can one with 1 - u > p * reach */
    int64_t index;
} Draw;

INLINE void counters(vu c[4], vu block, uint32_t position, uint32_t stream) {
    c[0] = block;
    c[1] = (vu)(vi){0} + position;
    c[2] = (vu)(vi){0} + stream;
    c[3] = (vu)(vi){0};
}

/* Word ids%4 of each lane's own call. */
INLINE vu words_of(vu ids, uint32_t k0, uint32_t k1, uint32_t position, uint32_t stream) {
    vu c[4], word = ids & 3u;
    counters(c, ids >> 2, position, stream);
    philox(c, k0, k1);
    vu w = c[0];
    for (uint32_t i = 1; i < 4; i++) {
        vu m = (vu)(word == i);
        w = (m & c[i]) | (~m & w);
    }
    return w;
}

static void raise(Draw *d, float score, int64_t index) {
    if (score > d->best || (score == d->best && index < d->index)) {
        d->best = score;
        d->index = index;
        d->threshold = exp1(score - GUMBEL_MAX - 0.01f);
        d->reach = exp1(-score) * 1.001f;
    }
}

/* Lanes that may win are scored in full. columns NULL: the lanes are columns first, first + 1, ... */
INLINE void offer(Draw *d, vf p, vu word, const int64_t *columns, int64_t first, int count) {
    if (!vany(1.0f - unit(word) <= p * d->reach)) return;
    vf score = vlog_prob(p) + gumbel(word);
    if (!vany(score >= d->best)) return;
    for (int i = 0; i < count; i++)
        if (score[i] >= d->best) raise(d, score[i], columns ? columns[i] : first + i);
}

static void draw_listed(Draw *d, const int64_t *columns, int count) {
    uint32_t ids[VW] __attribute__((aligned(64))) = {0};
    float p[VW] __attribute__((aligned(64))) = {0};
    for (int i = 0; i < count; i++) {
        ids[i] = (uint32_t)(d->ids ? d->ids[columns[i]] : columns[i]);
        p[i] = d->p[columns[i]];
    }
    offer(d, vload(p), words_of(*(vu *)ids, d->k0, d->k1, d->position, d->stream), columns, 0, count);
}

/* 4*VW neighbouring columns whose ids are columns: VW calls of four words. Lane 4q + j does call j*VW/4 + q, so that
 * transposing 4x4 blocks within 128-bit parts leaves the words in column order. */
static void draw_dense(Draw *d, int64_t first) {
    vu c[4], t[4];
    counters(c, (vu)(((viota() & 3) * (VW / 4)) + (viota() >> 2)) + (uint32_t)(first >> 2), d->position, d->stream);
    philox(c, d->k0, d->k1);
    t[0] = interleave(c[0], c[1], 0);
    t[1] = interleave(c[0], c[1], 1);
    t[2] = interleave(c[2], c[3], 0);
    t[3] = interleave(c[2], c[3], 1);
    for (int v = 0; v < 4; v++) {
        vu word = pair_up(t[v / 2], t[v / 2 + 2], v % 2);
        offer(d, vload(d->p + first + v * VW), word, NULL, first + v * VW, VW);
    }
}

INLINE int alive(const Draw *d, int64_t first, int count) { /* how many of the columns may still win */
    int total = 0;
    if (count == 4 * VW) {
        vi n = {0}, at[4];
        for (int v = 0; v < 4; v++) at[v] = vload(d->p + first + v * VW) >= d->threshold;
        if (!vany((at[0] | at[1]) | (at[2] | at[3]))) return 0;
        for (int v = 0; v < 4; v++) n -= at[v];
        for (int i = 0; i < VW; i++) total += n[i];
        return total;
    }
    for (int i = 0; i < count; i++) total += d->p[first + i] >= d->threshold;
    return total;
}

static int64_t largest(const float *p, int64_t v) {
    vf top = vset1(-1.0f);
    int64_t i = 0;
    for (; i + VW <= v; i += VW) top = vmax(vload(p + i), top);
    float m = -1.0f;
    for (int j = 0; j < VW; j++) m = top[j] > m ? top[j] : m;
    for (int64_t j = i; j < v; j++) m = p[j] > m ? p[j] : m;
    for (i = 0; i + VW <= v && !vany(vload(p + i) == m); i += VW) {
    }
    while (i < v && p[i] != m) i++;
    return i < v ? i : -1;
}

static int64_t draw_row(Draw *d) {
    int64_t pending[2 * VW], first_column = largest(d->p, d->v);
    int waiting = 0;
    if (first_column < 0 || !(d->p[first_column] > 0.0f)) return -1;
    d->best = -INFINITY;
    d->index = INT64_MAX;
    d->threshold = 1e-45f;
    d->reach = INFINITY;
    draw_listed(d, &first_column, 1); /* a likely winner first, so that the threshold bites at once */
    for (int64_t c = 0; c < d->v; c += 4 * VW) {
        int count = d->v - c < 4 * VW ? (int)(d->v - c) : 4 * VW;
        int left = alive(d, c, count);
        if (!left) continue;
        if (!d->ids && count == 4 * VW && left > VW / 2) {
            draw_dense(d, c);
            continue;
        }
        for (int i = 0; i < count; i++) {
            if (!(d->p[c + i] >= d->threshold)) continue;
            pending[waiting++] = c + i;
            if (waiting == VW) {
                draw_listed(d, pending, VW);
                waiting = 0;
            }
        }
    }
    if (waiting) draw_listed(d, pending, waiting);
    return d->index;
}

/* Returns how many rows had no support (their index is -1). */
EXPORT int64_t dspark_gumbel_argmax(int64_t *index, const float *p, const int64_t *seeds, const int64_t *positions,
                                    const int64_t *ids, uint32_t stream, int64_t n, int64_t v, int threads) {
    int64_t bad = 0;
#pragma omp parallel for schedule(dynamic) num_threads(threads) reduction(+ : bad) if (threads > 1 && n * v >= 16384)
    for (int64_t r = 0; r < n; r++) {
        Draw d = {p + r * v, ids, v, (uint32_t)seeds[r], (uint32_t)((uint64_t)seeds[r] >> 32), stream,
                  (uint32_t)positions[r], 0, 0, 0, 0};
        index[r] = draw_row(&d);
        bad += index[r] < 0;
    }
    return bad;
}

EXPORT void dspark_uniform(float *out, const int64_t *seeds, const int64_t *positions, uint32_t stream, int64_t n) {
    for (int64_t r = 0; r < n; r++) {
        vu w = words_of((vu)(vi){0}, (uint32_t)seeds[r], (uint32_t)((uint64_t)seeds[r] >> 32),
                        (uint32_t)positions[r], stream);
        out[r] = unit(w)[0];
    }
}

/* out[n, v] = G(seed[n], stream, position[n], ids[v]): the noise itself, for tests and for small laws. */
EXPORT void dspark_gumbel(float *out, const int64_t *seeds, const int64_t *positions, const int64_t *ids,
                          uint32_t stream, int64_t n, int64_t v) {
    for (int64_t r = 0; r < n; r++)
        for (int64_t c = 0; c < v; c += VW) {
            vu id = (vu)(vi){0};
            int count = v - c < VW ? (int)(v - c) : VW;
            for (int i = 0; i < count; i++) id[i] = (uint32_t)ids[c + i];
            vf g = gumbel(words_of(id, (uint32_t)seeds[r], (uint32_t)((uint64_t)seeds[r] >> 32),
                                   (uint32_t)positions[r], stream));
            for (int i = 0; i < count; i++) out[r * v + c + i] = g[i];
        }
}
