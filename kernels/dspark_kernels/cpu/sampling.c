/* From logits to the law a token is drawn from, and log-probabilities. Rows are independent; every sum is in one
 * fixed order (runs of 1024 logits in 16 fp32 lanes, the runs in double; or one chain in double over sorted
 * candidates), so that a nucleus of 0.999 still ends at the right token.
 *
 * shape: e_v = exp((l_v - max) / T); keep the top_k largest; of those the shortest prefix with mass >= top_p; of
 * those e >= min_p (the largest e is 1); divide by the sum. Order: logit descending, then token id ascending.
 * Only candidates are sorted: a threshold that provably keeps enough of them comes first. It never changes the
 * result, since the sorted prefix is the same however many candidates follow.
 */
#include "vec.h"

#define RUN 1024 /* logits per fp32 partial sum */
#define CELL 16 /* logits per cell maximum, for the top-k threshold; doubled while cells outnumber 4 top_k */

typedef struct {
    const float *logits;
    float *p;
    int64_t v;
    float temperature, top_p, min_p, max;
    int64_t top_k;
} Shape;

typedef struct {
    uint32_t key; /* descending logit = ascending key */
    uint32_t id;
} Candidate;

INLINE uint32_t descending(float x) {
    uint32_t u;
    x += 0.0f; /* -0 and 0 tie */
    memcpy(&u, &x, 4);
    return u & 0x80000000u ? u : 0x7fffffffu - u;
}

/* Largest of the row; *bad when it holds NaN or +inf, or nothing above -inf. */
static float row_max(const float *x, int64_t n, int *bad) {
    vf top = vset1(-INFINITY);
    vi nan = {0};
    int64_t i = 0;
    for (; i + VW <= n; i += VW) {
        vf a = vload(x + i);
        top = vmax(a, top);
        nan |= a != a;
    }
    float m = -INFINITY;
    int any = 0;
    for (int j = 0; j < VW; j++) {
        m = top[j] > m ? top[j] : m;
        any |= nan[j];
    }
    for (; i < n; i++) {
        m = x[i] > m ? x[i] : m;
        any |= x[i] != x[i];
    }
    *bad = any || !(m > -INFINITY) || m == INFINITY;
    return m;
}

/* exponentials() over one run of at most RUN logits. */
INLINE float run_exponentials(const float *x, float *p, int64_t n, float max, float t, float floor) {
    vf acc[LANES / VW];
    float lane[LANES] __attribute__((aligned(64)));
    for (int v = 0; v < LANES / VW; v++) acc[v] = vset1(0.0f);
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int v = 0; v < LANES / VW; v++) {
            vf d = vload(x + i + v * VW) - max;
            if (t != 1.0f) d = d / t;
            vf e = vexp(d);
            e = (vf)((vi)e & (e >= floor));
            if (p) vstore(p + i + v * VW, e);
            acc[v] = acc[v] + e;
        }
    for (int v = 0; v < LANES / VW; v++) vstore(lane + v * VW, acc[v]);
    for (int l = 0; i < n; i++, l++) {
        float e = exp1((x[i] - max) / t);
        e = e >= floor ? e : 0.0f;
        if (p) p[i] = e;
        lane[l] += e;
    }
    return lane_sum(lane);
}

/* p_v = e_v (0 where e_v < floor) when p is given; returns the sum over what is kept. */
static double exponentials(const float *x, float *p, int64_t n, float max, float t, float floor) {
    double sum = 0;
    for (int64_t i = 0; i < n; i += RUN)
        sum += run_exponentials(x + i, p ? p + i : NULL, n - i < RUN ? n - i : RUN, max, t, floor);
    return sum;
}

static void scale(float *p, int64_t n, float by) {
    int64_t i = 0;
    for (; i + VW <= n; i += VW) vstore(p + i, vload(p + i) * by);
    for (; i < n; i++) p[i] *= by;
}

/* Stable: equal keys keep their order, which is ascending id. */
static Candidate *sort_candidates(Candidate *a, Candidate *spare, int64_t n) {
    if (n <= 48) {
        for (int64_t i = 1; i < n; i++) {
            Candidate c = a[i];
            int64_t j = i;
            for (; j > 0 && a[j - 1].key > c.key; j--) a[j] = a[j - 1];
            a[j] = c;
        }
        return a;
    }
    uint32_t count[3][2048] = {{0}};
    for (int64_t i = 0; i < n; i++)
        for (int d = 0; d < 3; d++) count[d][(a[i].key >> (11 * d)) & 2047]++;
    for (int d = 0; d < 3; d++) {
        uint32_t sum = 0;
        if (count[d][(a[0].key >> (11 * d)) & 2047] == n) continue;
        for (int j = 0; j < 2048; j++) {
            uint32_t c = count[d][j];
            count[d][j] = sum;
            sum += c;
        }
        for (int64_t i = 0; i < n; i++) spare[count[d][(a[i].key >> (11 * d)) & 2047]++] = a[i];
        Candidate *t = a;
        a = spare;
        spare = t;
    }
    return a;
}

/* Columns with logit >= at, ascending id. */
static int64_t gather(const Shape *s, float at, Candidate *out) {
    int64_t n = 0, i = 0;
    for (; i + 4 * VW <= s->v; i += 4 * VW) {
        vi any = {0};
        for (int v = 0; v < 4; v++) any |= vload(s->logits + i + v * VW) >= at;
        if (!vany(any)) continue;
        for (int64_t c = i; c < i + 4 * VW; c++)
            if (s->logits[c] >= at) out[n++] = (Candidate){descending(s->logits[c]), (uint32_t)c};
    }
    for (; i < s->v; i++)
        if (s->logits[i] >= at) out[n++] = (Candidate){descending(s->logits[i]), (uint32_t)i};
    return n;
}

/* A logit that at least k logits reach: the k-th largest of the maxima of cells. -inf when there are too few cells. */
static float topk_threshold(const Shape *s, Candidate *cells, Candidate *spare) {
    int64_t width = CELL;
    while (s->v / (2 * width) >= 4 * s->top_k && width < 1024) width *= 2;
    int64_t n = s->v / width;
    if (n < s->top_k) return -INFINITY;
    for (int64_t c = 0; c < n; c++) {
        vf top = vload(s->logits + c * width);
        for (int64_t v = VW; v < width; v += VW) top = vmax(vload(s->logits + c * width + v), top);
        float m = top[0];
        for (int j = 1; j < VW; j++) m = top[j] > m ? top[j] : m;
        cells[c] = (Candidate){descending(m), (uint32_t)c};
    }
    Candidate *sorted = sort_candidates(cells, spare, n);
    uint32_t key = sorted[s->top_k - 1].key, u = key & 0x80000000u ? key : 0x7fffffffu - key;
    float at;
    memcpy(&at, &u, 4);
    return at;
}

/* The sum of p over logits >= at, any order will do: only a threshold depends on it. */
static double mass_above(const Shape *s, float at) {
    vf acc[4] = {vset1(0.0f), vset1(0.0f), vset1(0.0f), vset1(0.0f)};
    double sum = 0;
    int64_t i = 0;
    for (; i + 4 * VW <= s->v; i += 4 * VW)
        for (int v = 0; v < 4; v++)
            acc[v] = acc[v] + (vf)((vi)vload(s->p + i + v * VW) & (vload(s->logits + i + v * VW) >= at));
    for (; i < s->v; i++) sum += s->logits[i] >= at ? s->p[i] : 0.0f;
    for (int v = 0; v < 4; v++)
        for (int j = 0; j < VW; j++) sum += acc[v][j];
    return sum;
}

/* A logit such that those above it surely hold mass top_p * total (a wide margin for rounding), else -inf. */
static float nucleus_threshold(const Shape *s, double total) {
    double wanted = (double)s->top_p * total * 1.0001;
    for (float drop = 3.0f; drop < 30.0f; drop *= 1.7f) {
        float at = s->max - drop * s->temperature;
        if (mass_above(s, at) >= wanted) return at;
    }
    return -INFINITY;
}

/* Candidates kept, in order, with their e; sum of them all in *total. */
static int64_t top_k_law(const Shape *s, Candidate *c, int64_t n, float *e, double *total) {
    if (n > s->top_k) n = s->top_k;
    *total = 0;
    for (int64_t i = 0; i < n; i++) {
        e[i] = exp1((s->logits[c[i].id] - s->max) / s->temperature);
        *total += e[i];
    }
    return n;
}

static int64_t cut(const Shape *s, const float *e, int64_t n, double total) {
    int64_t kept = n;
    if (s->top_p < 1.0f) {
        double sum = 0, wanted = (double)s->top_p * total;
        for (kept = 0; kept < n && sum < wanted; kept++) sum += e[kept];
        if (kept == 0) kept = 1;
    }
    while (kept > 1 && e[kept - 1] < s->min_p) kept--;
    return kept;
}

/* Sorted path: top_k or top_p in force. Returns 1 when out of memory. */
static int shape_sorted(const Shape *s) {
    char *buf = dspark_scratch(1, (size_t)s->v * (2 * sizeof(Candidate) + sizeof(float)) + 64);
    if (!buf) return 1;
    Candidate *list = (Candidate *)buf, *spare = list + s->v;
    float *e = (float *)(spare + s->v);
    double total = 0, sum = 0;
    int64_t n;
    if (s->top_k > 0 && s->top_k < s->v) {
        n = gather(s, topk_threshold(s, list, spare), list);
        list = sort_candidates(list, spare, n);
        n = top_k_law(s, list, n, e, &total);
    } else {
        total = exponentials(s->logits, s->p, s->v, s->max, s->temperature, 0.0f);
        n = gather(s, nucleus_threshold(s, total), list);
        list = sort_candidates(list, spare, n);
        for (int64_t i = 0; i < n; i++) e[i] = s->p[list[i].id];
    }
    n = cut(s, e, n, total);
    for (int64_t i = 0; i < n; i++) sum += e[i];
    float inv = (float)(1.0 / sum);
    memset(s->p, 0, (size_t)s->v * sizeof(float));
    for (int64_t i = 0; i < n; i++) s->p[list[i].id] = e[i] * inv;
    return 0;
}

static void one_hot(const Shape *s) {
    memset(s->p, 0, (size_t)s->v * sizeof(float));
    for (int64_t i = 0; i < s->v; i++)
        if (s->logits[i] == s->max) {
            s->p[i] = 1.0f;
            return;
        }
}

/* 0 fine, 1 out of memory, 2 the row has NaN, +inf or no finite logit. */
static int shape_row(Shape *s) {
    int bad;
    s->max = row_max(s->logits, s->v, &bad);
    if (bad) return 2;
    if (s->temperature == 0.0f) {
        one_hot(s);
        return 0;
    }
    if (s->top_p < 1.0f || (s->top_k > 0 && s->top_k < s->v)) return shape_sorted(s);
    double sum = exponentials(s->logits, s->p, s->v, s->max, s->temperature, s->min_p);
    scale(s->p, s->v, (float)(1.0 / sum));
    return 0;
}

EXPORT int dspark_shape_probs(float *p, const float *logits, const float *temperature, const int64_t *top_k,
                              const float *top_p, const float *min_p, int64_t n, int64_t v, int threads) {
    int status = 0;
#pragma omp parallel for schedule(dynamic) num_threads(threads) reduction(| : status) if (threads > 1 && n * v >= 8192)
    for (int64_t r = 0; r < n; r++) {
        Shape s = {logits + r * v, p + r * v, v, temperature[r], top_p[r], min_p[r], 0, top_k[r]};
        status |= shape_row(&s);
    }
    return status;
}

/* out[n, v] = l - max - ln sum exp(l - max); entry for entry what dspark_raw_logprob gives. Returns 2 as shape_row. */
EXPORT int dspark_log_softmax(float *out, const float *logits, int64_t n, int64_t v, int threads) {
    int status = 0;
#pragma omp parallel for schedule(dynamic) num_threads(threads) reduction(| : status) if (threads > 1 && n * v >= 8192)
    for (int64_t r = 0; r < n; r++) {
        int bad;
        const float *x = logits + r * v;
        float max = row_max(x, v, &bad);
        if (bad) status |= 2;
        float log_sum = log1_prob((float)exponentials(x, NULL, v, max, 1.0f, 0.0f));
        for (int64_t i = 0; i < v; i++) out[r * v + i] = (x[i] - max) - log_sum;
    }
    return status;
}

/* out[n] = l[id] - max - ln sum exp(l - max), at temperature 1. Returns 2 for a row as in shape_row, 4 for an id outside. */
EXPORT int dspark_raw_logprob(float *out, const float *logits, const int64_t *ids, int64_t n, int64_t v,
                              int threads) {
    int status = 0;
#pragma omp parallel for schedule(dynamic) num_threads(threads) reduction(| : status) if (threads > 1 && n * v >= 8192)
    for (int64_t r = 0; r < n; r++) {
        int bad;
        const float *x = logits + r * v;
        if (ids[r] < 0 || ids[r] >= v) {
            status |= 4;
            continue;
        }
        float max = row_max(x, v, &bad);
        if (bad) status |= 2;
        out[r] = (x[ids[r]] - max) - log1_prob((float)exponentials(x, NULL, v, max, 1.0f, 0.0f));
    }
    return status;
}

/* out[n] = ln p[id]; returns 4 when an id lies outside. */
EXPORT int dspark_log_of(float *out, const float *p, const int64_t *ids, int64_t n, int64_t v) {
    int status = 0;
    for (int64_t r = 0; r < n; r++) {
        if (ids[r] < 0 || ids[r] >= v) status |= 4;
        else out[r] = log1_prob(p[r * v + ids[r]]);
    }
    return status;
}
